"""What notebooks show besides curves: text with its accepted draft tokens coloured, and which pairs load under which policy.

What enters: generations and outcomes. What leaves: HTML and matplotlib Axes. It neither decodes nor loads.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bench.atomic import write_bytes
from .errors import ConfigError
from .plot_style import DARK, GREEN, VERMILION, in_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .decode.request import Generation
    from .reproduce import Outcome

# Tints of the plots' draft colour, one per draft position; deeper positions are darker.
DRAFT_TINTS = ("#FCE8C3", "#F9D48F", "#F5C05C", "#EFAA2B", "#E69F00")
LEGEND = "accepted draft tokens, darker by draft position; unmarked: the verifier's own"


@dataclass(frozen=True, slots=True)
class Html:
    """Markup that a notebook renders."""

    source: str

    def _repr_html_(self) -> str:
        return self.source

    def save(self, path: Path) -> None:
        """Write it as a page of its own."""
        write_bytes(path, f'<!DOCTYPE html><meta charset="utf-8">{self.source}\n'.encode())


@dataclass(frozen=True, slots=True)
class Emitted:
    """Where one output token came from.

    round: from 0, None for the prompt pass. draft_position: from 1, None for the verifier's own token.
    """

    round: int | None
    draft_position: int | None


def origins(accepted_per_round: Sequence[int], num_tokens: int) -> list[Emitted]:
    """The origin of each of `num_tokens` output tokens: the prompt pass, then per round its accepted draft tokens and the verifier's own.

    Raises:
        ConfigError: the counts do not add up to the tokens; only the last round may lack its own token.
    """
    found = [Emitted(None, None)]
    for index, accepted in enumerate(accepted_per_round):
        found += [Emitted(index, position) for position in range(1, accepted + 1)]
        found.append(Emitted(index, None))
    if len(found) - num_tokens not in (0, 1) or (len(found) > num_tokens and not accepted_per_round):
        raise ConfigError(f"{num_tokens} tokens do not fit accepted counts {list(accepted_per_round)}, which make {len(found)} or one less")
    return found[:num_tokens]


def accepted_text(generation: Generation, tokenizer: Any, title: str = "") -> Html:
    """The output of one prompt, each accepted draft token on a coloured ground; hovering tells round and position.

    Args:
        tokenizer: turns ids into text. Tokens that are no whole character are shown with the next one.
    """
    spans = []
    for piece, origin in _pieces(generation, tokenizer):
        text = html.escape(piece)
        if origin.draft_position is None:
            spans.append(text)
            continue
        tint = DRAFT_TINTS[min(origin.draft_position, len(DRAFT_TINTS)) - 1]
        hint = f"round {(origin.round or 0) + 1}, draft position {origin.draft_position}"
        spans.append(f'<span style="background:{tint};color:#000" title="{hint}">{text}</span>')
    share = sum(generation.accepted_per_round) / len(generation.token_ids)
    head = f"<p><b>{html.escape(title)}</b></p>" if title else ""
    tail = f'<p style="font-size:85%">{LEGEND}. {share:.0%} of {len(generation.token_ids)} tokens were drafted.</p>'
    body = f'<div style="white-space:pre-wrap;font-family:monospace;line-height:1.5;max-width:70em">{"".join(spans)}</div>'
    return Html(head + body + tail)


def outcomes(attempts: Sequence[Outcome], ax: Axes | None = None) -> Axes:
    """A cell per verifier and policy: did the draft load, and what stopped it."""
    from matplotlib import pyplot
    from matplotlib.patches import Rectangle

    columns = list(dict.fromkeys(o.policy for o in attempts))
    rows = list(dict.fromkeys((o.verifier, o.verifier_quantization) for o in attempts))
    with in_style(**{"axes.grid": False}):
        canvas = ax if ax is not None else pyplot.subplots(figsize=(2.0 + 3.0 * len(columns), 1.1 + 0.9 * len(rows)))[1]
        for attempt in attempts:
            x, y = columns.index(attempt.policy), rows.index((attempt.verifier, attempt.verifier_quantization))
            colour = GREEN if attempt.loaded else VERMILION
            text = "loads" if attempt.loaded else f"{'KeyError' if attempt.is_key_error else attempt.error}\n{attempt.key}"
            canvas.add_patch(Rectangle((x - 0.47, y - 0.44), 0.94, 0.88, facecolor=colour, alpha=0.18, edgecolor=colour))
            canvas.text(x, y, text, ha="center", va="center", fontsize=9, color=DARK)
        canvas.set_xlim(-0.55, len(columns) - 0.45)
        canvas.set_ylim(len(rows) - 0.45, -0.55)
        canvas.set_xticks(range(len(columns)), [f"policy {name}" for name in columns])
        canvas.xaxis.tick_top()
        canvas.set_yticks(range(len(rows)), [_weights(kind) for _, kind in rows])
        canvas.tick_params(length=0)
        for side in canvas.spines.values():
            side.set_visible(False)
        canvas.set_title("Does the plain draft load?")
    return canvas


def _weights(quantization: str) -> str:
    """Row label: "compressed-tensors pack-quantized W4" on lines of its own."""
    return "verifier weights:\n" + ("plain" if quantization == "none" else quantization.replace(" ", "\n", 1))


def _pieces(generation: Generation, tokenizer: Any) -> list[tuple[str, Emitted]]:
    ids, shown, pieces = generation.token_ids, "", []
    for count, origin in enumerate(origins(generation.accepted_per_round, len(ids)), 1):
        text = tokenizer.decode(ids[:count], clean_up_tokenization_spaces=False)
        if text.endswith("\ufffd") and count < len(ids):
            continue  # half a character
        pieces.append((text[len(shown) :], origin))
        shown = text
    return pieces
