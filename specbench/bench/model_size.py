"""How large loaded models are and what a step reads: the figures beside which draft and verifier steps make sense.

What enters: loaded models. What leaves: parameters, bytes, and a table of both models of a pair. It does not know files or prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..quant.linear import Linear
from .cost_model import draft_is_too_slow
from .round_costs import round_seconds

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class ModelSize:
    """parameters: weights, one for each value however it is packed. weight_bytes: in memory. bytes_per_step: of weights that a decode step
    reads: all but the embedding, of which it reads a row."""

    parameters: int
    weight_bytes: int
    bytes_per_step: int


def model_size(model: nn.Module, shared: nn.Module | None = None) -> ModelSize:
    """The size of a loaded verifier or draft.

    Args:
        shared: another model whose tensors this one may borrow; borrowed weights count as read, not as stored or as own parameters.
    """
    seen = {tensor.data_ptr() for module in shared.modules() for tensor in _tensors(module)} if shared is not None else set()
    parameters = stored = read = 0
    counted: set[int] = set()
    for module in model.modules():
        tensors = [tensor for tensor in _tensors(module) if tensor.is_floating_point() or isinstance(module, Linear)]
        own = [tensor for tensor in tensors if tensor.data_ptr() not in seen | counted]
        size = sum(tensor.nbytes for tensor in tensors)
        if isinstance(module, nn.Embedding):
            read += module.weight.shape[1] * module.weight.element_size()
        else:
            read += size
        stored += sum(tensor.nbytes for tensor in own)
        if own:
            parameters += _values(module, own)
        counted |= {tensor.data_ptr() for tensor in own}
    return ModelSize(parameters, stored, read)


def pair_steps(verifier: Any, draft: Any, k: int, mean_acceptance_length: float | None = None) -> pd.DataFrame:
    """Both models of a pair: role | parameters | weight_bytes | bytes_per_step | step_s | step_over_verifier_step | share_of_bandwidth,
    note.

    step_s is timed alone; share_of_bandwidth is bytes_per_step / step_s over what the device's memory can do, None where that is not known
    (on a CPU). note says where the draft's steps alone make a round slower than plain decoding, at the given mean acceptance length.
    """
    import pandas as pd

    seconds = round_seconds(verifier, draft, k)
    step = seconds.draft_s / k
    peak = memory_bandwidth(verifier.device)
    slow = None if mean_acceptance_length is None else draft_is_too_slow(k, step / seconds.plain_s, mean_acceptance_length)
    rows = []
    for role, size, step_s, note in (
        ("verifier", model_size(verifier), seconds.plain_s, None),
        ("draft", model_size(draft, verifier), step, slow),
    ):
        rows.append(
            {
                "role": role, "parameters": size.parameters, "weight_bytes": size.weight_bytes, "bytes_per_step": size.bytes_per_step,
                "step_s": step_s, "step_over_verifier_step": step_s / seconds.plain_s,
                "share_of_bandwidth": None if peak is None else size.bytes_per_step / step_s / peak, "note": note or "",
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def memory_bandwidth(device: torch.device) -> float | None:
    """Bytes a second that the memory of a CUDA device can move at most, from its clock and bus width; None for others."""
    if device.type != "cuda":
        return None
    facts: Any = torch.cuda.get_device_properties(device)
    clock_khz, bus_bits = getattr(facts, "memory_clock_rate", 0), getattr(facts, "memory_bus_width", 0)
    return 2 * clock_khz * 1e3 * bus_bits / 8 if clock_khz and bus_bits else None  # two transfers a clock


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """A module's own tensors, those inside a packed layer's kernel too."""
    yield from (tensor for tensor in module.parameters(recurse=False))
    waiting: list[Any] = [module.kernel] if isinstance(module, Linear) else []
    while waiting:
        for value in getattr(waiting.pop(), "__dict__", {}).values():
            if isinstance(value, Tensor):
                yield value
            elif type(value).__module__.startswith(__package__.partition(".")[0]):  # a kernel inside a kernel
                waiting.append(value)


def _values(module: nn.Module, own: list[Tensor]) -> int:
    if isinstance(module, Linear):
        bias = 0 if module.bias is None else module.bias.numel()
        return module.in_features * sum(module.out_features) + bias
    return sum(tensor.numel() for tensor in own)
