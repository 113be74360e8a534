"""Try to load a draft, and keep what happened as data.

What enters: a pair and a policy. What leaves: an `Outcome`, also where loading fails. It fixes nothing and knows no engine by name.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import CheckpointKeyError, SpecbenchError
from .pair import Pair
from .plan import describe_quantization
from .policies import Policy, get_policy

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one attempt ended.

    verifier_quantization: "none", "compressed-tensors pack-quantized", ... error: class of the exception, "" if loaded. is_key_error: code
    that catches KeyError would catch it. key: `args[0]` of that KeyError, the parameter that was looked up. tensor: the stored tensor that
    was to go there. module_parameters: what the module has in its place. frames: the innermost calls, outermost first.
    """

    verifier: str
    verifier_quantization: str
    draft: str
    policy: str
    loaded: bool
    error: str = ""
    message: str = ""
    is_key_error: bool = False
    key: str = ""
    tensor: str = ""
    module_parameters: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()

    def to_frame(self) -> pd.DataFrame:
        """What failed, as rows `fact | value`; empty where nothing did."""
        import pandas as pd

        rows = [
            ("error", f"{self.error}, a KeyError" if self.is_key_error else self.error),
            ("its args[0]" if self.key else "message", self.key or self.message),
            ("stored tensor", self.tensor),
            ("parameters of that module", ", ".join(self.module_parameters)),
            ("innermost calls", " > ".join(self.frames)),
        ]
        return pd.DataFrame([row for row in rows if row[1]], columns=["fact", "value"])


def attempt_load(pair: Pair, policy: str | Policy = "draft", *, device: str = "cpu", **options: Any) -> Outcome:
    """Load the draft of `pair` under `policy` and let it go again; an error that loading raises on purpose becomes part of the outcome.

    Args:
        options: passed on to `load_draft`.
    """
    from .load import load_draft

    known: dict[str, Any] = {
        "verifier": pair.verifier.name,
        "verifier_quantization": describe_quantization(pair.verifier.quantization),
        "draft": pair.draft.name,
        "policy": get_policy(policy).name,
    }
    try:
        load_draft(pair, policy, device=device, **options)
    except SpecbenchError as error:
        return Outcome(**known, loaded=False, **_describe(error))
    return Outcome(**known, loaded=True)


def outcome_table(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """A row per outcome: verifier_quantization | policy | loaded | what stopped it."""
    import pandas as pd

    rows = [(o.verifier, o.verifier_quantization, o.policy, o.loaded, _in_short(o)) for o in outcomes]
    return pd.DataFrame(rows, columns=["verifier", "verifier_quantization", "policy", "loaded", "stopped_by"])


def _describe(error: SpecbenchError) -> dict[str, Any]:
    frames = tuple(f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in traceback.extract_tb(error.__traceback__)[-3:])
    facts = {"error": type(error).__name__, "message": str(error), "is_key_error": isinstance(error, KeyError), "frames": frames}
    if isinstance(error, CheckpointKeyError):
        facts |= {"key": error.args[0], "tensor": error.tensor, "module_parameters": error.module_parameters}
    return facts


def _in_short(outcome: Outcome) -> str:
    if outcome.loaded:
        return ""
    kind = "KeyError" if outcome.is_key_error else outcome.error
    return f"{kind}: {(outcome.key or outcome.message).splitlines()[0]}"
