"""Match stored tensors with a module's parameters, and copy them in.

What enters: a module on the meta device or in memory, tensors or where their bytes lie. What leaves: a filled module, or an error that
names every disagreement. It does not know configs or policies, nor whether the module is a verifier or a draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, CheckpointKeyError, CheckpointShapeError
from ..quant.linear import Linear
from .files import DTYPES, TensorInfo, fits_directly, read_blocks, read_into, same_shape

Stored = TensorInfo | Tensor

# checkpoint name of a projection -> (the fused parameter's name, its place in it)
FUSED = {
    "q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
}  # fmt: skip


def place(name: str) -> tuple[str, int | None]:
    """Parameter name, and shard within it, of checkpoint tensor `name` (without a leading "model.")."""
    *parents, owner, leaf = name.split(".") if name.count(".") else ("", "", name)
    if owner in FUSED:
        fused, shard = FUSED[owner]
        return ".".join([*parents, fused, leaf]), shard
    return name, None


def is_cache_scale(name: str) -> bool:
    """Scales of an FP8 key/value cache; the caches here hold the compute dtype or round without a scale, so they are known and not used."""
    return name.endswith((".k_scale", ".v_scale", ".kv_scale"))


def stored_name(parameter: str, shard: int | None) -> str:
    """The checkpoint's name of what fills `shard` of `parameter`: the inverse of `place`."""
    parents, _, leaf = parameter.rpartition(".")
    parent, _, owner = parents.rpartition(".")
    part = next((part for part, fused in FUSED.items() if fused == (owner, shard)), owner)
    return ".".join(name for name in (parent, part, leaf) if name)


def destination(module: nn.Module, parameter: str, shard: int | None) -> Tensor:
    """The tensor (a view, for a shard) that a checkpoint tensor fills. Raises KeyError where the module has no such parameter."""
    owner_name, _, leaf = parameter.rpartition(".")
    try:
        owner = module.get_submodule(owner_name)
    except AttributeError:
        raise KeyError(parameter) from None
    tensor = owner._parameters.get(leaf)
    if tensor is None:
        raise KeyError(parameter)
    if shard is not None and isinstance(owner, Linear):
        return owner.shard(leaf, shard).data
    return tensor.data


def check(module: nn.Module, tensors: dict[str, TensorInfo], where: str, optional: set[str]) -> None:
    """Refuse disagreements between stored tensors and parameters before a byte is read (see `compare`).

    Raises:
        CheckpointError: naming every disagreement, at most five of a kind.
    """
    problems = compare(module, tensors, optional)
    if any(problems.values()):
        spelled = {kind: [f"{name}{said}" for name, said in names.items()] for kind, names in problems.items()}
        lines = [f"  {kind} ({len(names)}): " + "; ".join(names[:5]) for kind, names in spelled.items() if names]
        raise CheckpointError(f"{where}: stored tensors and configuration disagree; no weight was read\n" + "\n".join(lines))


def compare(module: nn.Module, tensors: Mapping[str, TensorInfo], optional: set[str]) -> dict[str, dict[str, str]]:
    """Where stored tensors and parameters disagree: "unexpected", "shape", "dtype" (its kind) and "missing" -> tensor name -> what was
    found, as text that follows the name.

    Args:
        optional: parameters that no file needs to fill.
    """
    problems: dict[str, dict[str, str]] = {"unexpected": {}, "shape": {}, "dtype": {}}
    wanted = {(name, shard) for name, _ in module.named_parameters() for shard in _shards(module, name)}
    filled: set[tuple[str, int | None]] = set()
    for name, info in tensors.items():
        parameter, shard = place(name)
        if (parameter, shard) not in wanted:  # also a whole fused tensor beside its parts
            problems["unexpected"][name] = f" ({info.dtype} {list(info.shape)})"
            continue
        out = destination(module, parameter, shard)
        filled.add((parameter, shard))
        if not same_shape(info.shape, tuple(out.shape)):
            problems["shape"][name] = f": stored {list(info.shape)}, expected {list(out.shape)}"
        if not _converts(DTYPES[info.dtype], out.dtype):
            problems["dtype"][name] = f": stored {info.dtype}, expected {_short(out.dtype)}"
    absent = sorted((name, shard) for name, shard in wanted - filled if name not in optional)
    problems["missing"] = {stored_name(name, shard): "" for name, shard in absent if not _may_be_left_out(module, name)}
    return problems


def drop_left_out(module: nn.Module, tensors: Iterable[str]) -> None:
    """Remove parameters that a format makes optional and the file leaves out (GPTQ's g_idx)."""
    stored = {place(name)[0] for name in tensors}
    for name, _ in list(module.named_parameters()):
        if name not in stored and _may_be_left_out(module, name):
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner).register_parameter(leaf, None)


def _may_be_left_out(module: nn.Module, parameter: str) -> bool:
    owner, _, leaf = parameter.rpartition(".")
    linear = module.get_submodule(owner)
    return isinstance(linear, Linear) and leaf in linear.slots and linear.slots[leaf].optional


def fill(module: nn.Module, tensors: Iterable[tuple[str, Stored]], where: str, checks: str, *, threads: int = 1, progress: int = 0) -> None:
    """Copy stored tensors into parameters, in the order that they come.

    Args:
        checks: "strict" also refuses values that are not finite; "unexpected" copies whatever comes; "none" skips what finds no parameter.
        threads: how many copy side by side; more than 1 asks for `tensors` that stay valid.
        progress: how many tensors come, for a bar that appears after a second; 0 shows none.

    Raises:
        CheckpointKeyError: a tensor that finds no parameter; its text is the parameter name that was looked up.
        CheckpointError: shapes differ.
    """
    from tqdm.auto import tqdm

    def copy(job: tuple[str, Stored, Tensor, bool]) -> bool:
        name, item, out, last = job
        if not _copy(name, item, out, checks == "strict"):
            stored = DTYPES[item.dtype] if isinstance(item, TensorInfo) else item.dtype
            cast = "" if out.dtype == stored else f", or {_short(stored)} values that {_short(out.dtype)} cannot hold"
            raise CheckpointError(f"{where}: {name} holds values that are not finite (the file is damaged{cast})")
        return last

    jobs = (piece for job in _destinations(module, tensors, where, skip=checks == "none") for piece in _pieces(*job))
    bar = tqdm(desc="loading", total=progress or None, disable=not progress, delay=1, leave=False, unit="tensor")
    with ThreadPoolExecutor(threads) as pool, bar:
        for last in map(copy, jobs) if threads == 1 else pool.map(copy, jobs):
            bar.update(last)


def _destinations(module: nn.Module, tensors: Iterable[tuple[str, Stored]], where: str, skip: bool) -> Iterator[tuple[str, Stored, Tensor]]:
    for name, item in tensors:
        parameter, shard = place(name)
        try:
            yield name, item, destination(module, parameter, shard)
        except KeyError:
            if skip:
                continue
            raise CheckpointKeyError(parameter, tensor=name, module_parameters=_siblings(module, parameter), source=where) from None


def _pieces(name: str, item: Stored, out: Tensor) -> Iterator[tuple[str, Stored, Tensor, bool]]:
    """`item` cut into blocks of rows, so that temporaries stay small and threads share a large tensor."""
    shape, size = tuple(item.shape), item.end - item.begin if isinstance(item, TensorInfo) else item.nbytes
    if size <= PIECE or shape != tuple(out.shape) or (isinstance(item, TensorInfo) and item.pickled):
        yield name, item, out, True
        return
    row = size // shape[0]
    step = max(1, PIECE // row)
    for start in range(0, shape[0], step):
        count = min(step, shape[0] - start)
        if isinstance(item, TensorInfo):
            begin = item.begin + start * row
            part: Stored = replace(item, shape=(count, *shape[1:]), begin=begin, end=begin + count * row)
        else:
            part = item.narrow(0, start, count)
        yield name, part, out.narrow(0, start, count), start + count == shape[0]


def _copy(name: str, item: Stored, out: Tensor, check: bool) -> bool:
    """Fill `out`; whether all of it is finite, where `check` asks."""
    if isinstance(item, TensorInfo):
        if fits_directly(item, out) and item.shape == out.shape:
            good, bits = True, _bits(out) if check else None
            for part in read_blocks(item, out):
                good = good and (bits is None or _all_finite(*bits, part))
            return good and (not check or bits is not None or finite(out))
        read_into(item, out)
        return not check or finite(out)
    if not same_shape(tuple(item.shape), tuple(out.shape)):
        raise CheckpointShapeError(f"{name} is {list(item.shape)}; its place is {list(out.shape)}")
    out.copy_(item.view(out.shape))
    return not check or finite(out)


def _shards(module: nn.Module, parameter: str) -> list[int | None]:
    owner_name, _, _ = parameter.rpartition(".")
    owner = module.get_submodule(owner_name)
    return list(range(len(owner.out_features))) if isinstance(owner, Linear) and len(owner.out_features) > 1 else [None]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _siblings(module: nn.Module, parameter: str) -> tuple[str, ...]:
    owner = parameter.rpartition(".")[0]
    return tuple(name for name, _ in module.named_parameters() if name.startswith(owner + "."))


# dtype -> its bytes, and the bits of its smallest value that is not finite, sign aside
BITS = {
    torch.float64: (8, 0x7FF0_0000_0000_0000), torch.float32: (4, 0x7F80_0000), torch.float16: (2, 0x7C00), torch.bfloat16: (2, 0x7F80),
    torch.float8_e4m3fn: (1, 0x7F), torch.float8_e5m2: (1, 0x7C),
}  # fmt: skip
BLOCK = 1 << 18  # values
PIECE = 32 << 20  # bytes
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _converts(stored: torch.dtype, expected: torch.dtype) -> bool:
    """Whether numbers keep their meaning: any float as another, an index as one at least as wide, all else only as itself."""
    if stored in FLOATS:
        return expected in FLOATS
    return stored == expected or (stored, expected) == (torch.int32, torch.int64)


def finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite.

    Not by `isfinite`, which is slow and makes temporaries: a value whose exponent bits are all set is, as an integer, above every finite
    one of its sign, so that two integer maxima decide.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    bits = _bits(tensor)
    if bits is None:
        low, high = (tensor.float() if tensor.dtype.itemsize == 1 else tensor).aminmax()
        return bool(torch.isfinite(low) & torch.isfinite(high))
    return all(_all_finite(*bits, slice(start, start + BLOCK)) for start in range(0, tensor.numel(), BLOCK))


def _bits(tensor: Tensor) -> tuple[Any, int] | None:
    """The flat tensor as signed integers, and the smallest that is no finite value; None where it cannot be seen so."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.dtype not in BITS:
        return None
    integer, smallest = BITS[tensor.dtype]
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().view(f"i{integer}"), smallest


def _all_finite(bits: Any, smallest: int, part: slice) -> bool:
    signed = bits[part]
    unsigned = signed.view(f"u{bits.itemsize}")
    return bool(signed.max() < smallest and unsigned.max() < smallest + (1 << (8 * bits.itemsize - 1)))


def first_part(module: str) -> str:
    """A fused module is asked about by its first projection's name: "self_attn.qkv_proj" as "self_attn.q_proj"."""
    parent, _, leaf = module.rpartition(".")
    parts = [part for part, (fused, place_) in FUSED.items() if fused == leaf and place_ == 0]
    return f"{parent}.{parts[0]}" if parts else module
