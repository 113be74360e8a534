"""How the weight files of both sides are found and read, and what the draft's hold against what its plan builds.

What enters: a subject. What leaves: findings. It opens no weight file beyond its header.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from ..checkpoint.files import TensorInfo
from ..checkpoint.fill import compare
from ..errors import SpecbenchError
from ..load_settings import draft_load_config, load_settings
from ..plan import describe_quantization
from ..policies import DRAFT
from ..settings import QUANTIZED_LEAVES
from .findings import Finding
from .rules import refusal
from .subject import PLAIN_DTYPES, SIDES, Subject, finding, place_of

if TYPE_CHECKING:
    from ..load import Prepared

CODES = {"missing": "tensors-missing", "unexpected": "tensors-unexpected", "shape": "shape-mismatch", "dtype": "dtype-mismatch"}
SHOWN = 5  # names of a kind


def file_findings(subject: Subject) -> Iterator[Finding]:
    """Pickles, files that are not read, load formats that find nothing or draw weights."""
    for side in SIDES:
        files = subject.side(side).files
        if files is not None and files.pickled:
            names = ", ".join(file.name for file in files.files[:SHOWN])
            sentence = f"the {side}'s weights are pickles ({names}): they have no header, so names and shapes come from torch's unpickler"
            yield finding("pickles", sentence, {f"{side} files": names})
        if files is not None and files.left_out:
            left, read = ", ".join(file.name for file in files.left_out[:SHOWN]), ", ".join(file.name for file in files.files[:SHOWN])
            yield finding(
                "other-weights", f"the {side}'s {left} is not read; {read} is", {f"{side} files: read": read, f"{side} files: left": left}
            )
    config = draft_load_config(subject.pair, DRAFT)
    if config.load_format == "dummy":
        own = subject.pair.draft_load is not None
        whose = "draft_load_config" if own else "the verifier's load config, which counts while draft_load_config is unset,"
        said = {f"{'draft' if own else 'verifier'} load config: load_format": "dummy"}
        yield finding("random-weights", f"{whose} says load_format 'dummy': the draft's weights would be random numbers", said)
    weights = next(setting for setting in load_settings(subject.pair, DRAFT) if setting.name == "weights")
    if weights.value is None:
        files = subject.pair.draft.files
        held = ", ".join(file.name for file in files.files) if files else "nothing"
        said = {"draft load config: load_format": config.load_format, "draft files": held}
        yield finding("load-format-conflict", f"load_format {config.load_format!r} finds no weights of the draft, which are {held}", said)


def _narrow(name: str, info: TensorInfo) -> bool:
    """Whether a tensor is there only in packed or scaled formats."""
    return name.rpartition(".")[2] in QUANTIZED_LEAVES or (name.endswith(".weight") and info.dtype not in PLAIN_DTYPES)


def prepared_draft(subject: Subject) -> tuple[Prepared | None, tuple[Finding, ...]]:
    """The draft as its own files build it, on the meta device; None and a reason where they do not."""
    from ..load import prepare

    try:
        return prepare(subject.pair, DRAFT, subject.dtype, subject.overrides or None), ()
    except SpecbenchError as error:
        code = "quantization-unknown" if not error.code and subject.pair.draft.quantization else "refused"
        return None, (refusal(error, partial(place_of, subject), code),)


def tensor_findings(subject: Subject, prepared: Prepared) -> Iterator[Finding]:
    """Stored tensors against parameters: missing, unexpected, other shapes, other kinds of dtype."""
    problems = compare(prepared.model, prepared.tensors, prepared.borrowed | prepared.computed)
    section, plain = prepared.plan["quantization"], [i for n, i in prepared.tensors.items() if n.endswith("_proj.weight")]
    if section and any(problems.values()) and not any(_narrow(name, info) for name, info in prepared.tensors.items()):
        declared = describe_quantization(section)
        sentence = f"the draft declares {declared}, but stores plain weights only: config or weights are another model's"
        held = {place_of(subject, f"draft tensors: {info.name}"): f"{info.dtype} {list(info.shape)}" for info in plain[:1]}
        said = {f"draft {subject.pair.draft.quantization_source}": declared, **held}
        fix = "Remove quantization_config from the draft's config.json (and hf_quant_config.json), if the weights are meant to be plain."
        yield finding("quantization-contradicted", sentence, said, fix=fix)
        return
    for kind, names in problems.items():
        if names:
            listed = "; ".join(f"{name}{said}" for name, said in list(names.items())[:SHOWN])
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            said = {
                place_of(subject, f"draft tensors: {name}"): text.strip(" :()") or "absent" for name, text in list(names.items())[:SHOWN]
            }
            yield finding(CODES[kind], f"{len(names)} tensors of the draft are not what its config builds ({kind}): {listed}{more}", said)
