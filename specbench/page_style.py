"""How summary pages look, and the words that they explain.

What enters: nothing. What leaves: a style sheet, column headings and definitions. It does not know what a page shows.
"""

from __future__ import annotations

from dataclasses import dataclass

CSS = """
:root { color-scheme: light; }
body { margin: 0; background: #fff; color: #222; font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.2rem; }
h1 { font-size: 1.6rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2rem 0 .6rem; }
h3 { font-size: 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { padding: .3rem .9rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #e5e5e5; }
thead th { border-bottom: 2px solid #4d4d4d; vertical-align: bottom; min-width: 3.2rem; }
th.n { text-align: right; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.pairs th { font-weight: normal; color: #4d4d4d; white-space: nowrap; }
.pairs td { overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); gap: 1.2rem; align-items: start; }
img { max-width: 100%; height: auto; }
.note { background: #fdf3dc; padding: .5rem .8rem; }
li { margin: .3rem 0; }
dt { font-weight: bold; margin-top: .5rem; }
dd { margin: 0; }
summary { cursor: pointer; padding: .3rem 0; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True, slots=True)
class Column:
    """How a figure is shown: heading with the unit, format, and what to multiply by."""

    heading: str
    form: str = ".2f"
    scale: float = 1.0


# Tables of a page: figures of a summary by name.
TABLES = {
    "Acceptance": {
        "num_prompts": Column("prompts", ".0f"),
        "num_failed": Column("failed rows", ".0f"),
        "mean_acceptance_length": Column("mean acceptance length, over drafts (95 %)"),
        "mean_acceptance_length_over_prompts": Column("the same, over prompts (95 %)"),
        "draft_acceptance_rate": Column("draft acceptance rate", ".3f"),
        "node_acceptance_rate": Column("accepted / scored", ".3f"),
        "num_unlike_k0": Column("outputs unlike k=0", ".0f"),
    },
    "Speed": {
        "decode_tokens_per_second": Column("decode tokens / s (95 %)", ".1f"),
        "speedup": Column("decode speedup (95 %)"),
        "predicted_speedup": Column("predicted speedup"),
        "break_even_length": Column("break-even length"),
        "verify_cost": Column("T(k+1) / T(1)"),
        "draft_cost": Column("draft / T(1)"),
        "end_to_end_speedup": Column("end-to-end speedup"),
    },
    "Latency and memory": {
        "ttft_s": Column("time to first token, ms (95 %)", ".1f", 1e3),
        "inter_token_latency_s": Column("inter-token latency, ms (95 %)", ".1f", 1e3),
        "emission_gap_p95_s": Column("between rounds, 95th percentile, ms", ".1f", 1e3),
        "peak_memory_bytes": Column("peak memory, GB", ".2f", 1e-9),
    },
}
READ_OFF = {"read_off": Column("read off (95 %)"), "measured": Column("measured (95 %)")}

DEFINITIONS = {
    "mean acceptance length": (
        "tokens that a round commits: accepted draft tokens and the verifier's own (bonus counted). Over drafts: every round that proposed "
        "something weighs alike, as in vLLM's metrics. Over prompts: the mean of each prompt's own."
    ),
    "draft acceptance rate": "accepted / proposed draft tokens, bonus not counted.",
    "unconditional and conditional rate": (
        "of a draft position: accepted / rounds that proposed it, and the same among rounds that accepted all earlier positions."
    ),
    "decode tokens / s": (
        "tokens after the first / seconds after the first token; the prompt pass is in neither. In a batch, of all its sequences together."
    ),
    "decode speedup": "decode tokens / s over those of k = 0: same loop, run, prompts, repeats, batch size and sampling.",
    "break-even length": (
        "mean acceptance length at which this configuration would be as fast as k = 0: seconds of a round / seconds of a plain token."
    ),
    "T(k+1) / T(1)": "a verifying pass over k + 1 tokens in units of a plain pass; draft / T(1) is all that the draft does in a round.",
    "predicted speedup": ("mean acceptance length / (T(k+1) / T(1) + draft / T(1)): what is left to the measured one is time of the host."),
    "TTFT, inter-token latency": "seconds to the first token; seconds of decoding / tokens after the first, of a single sequence.",
    "95 %": "percentile bootstrap over prompts: whole prompts are drawn, with their turns and repeats.",
    "peak memory": "of the whole process while a prompt was decoded: all models that were loaded, whichever decoded.",
}
