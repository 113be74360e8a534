"""Which files of a checkpoint folder hold its weights.

What enters: a folder and a load format. What leaves: `WeightFiles`: the files to read, in order, and those that are there but not read.
It does not open a weight file, and knows no tensor.

A name counts when it ends in exactly .safetensors, .bin or .pt, is not hidden, and is not one of `NOT_WEIGHTS`: notes.safetensors.json and
model.safetensors.partial are no weights. The first kind found in the order of `KINDS` is read, and only that one. Beside an index, exactly
the files that it names. Sources: vLLM 0.32.0 model_executor/model_loader/default_loader.py (kinds per format, no fallback from safetensors)
and weight_utils.py (`filter_files_not_needed_for_inference`, `filter_duplicate_safetensors_files`, natural order).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointFileError
from .files import INDEX, read_index

KINDS: dict[str, tuple[str, ...]] = {
    "auto": (".safetensors", ".bin", ".pt"),
    "hf": (".safetensors", ".bin", ".pt"),
    "safetensors": (".safetensors",),
    "fastsafetensors": (".safetensors",),
    "runai_streamer": (".safetensors",),
    "npcache": (".bin",),
    "pt": (".pt",),
    "dummy": (),
}
INDEXES = {".safetensors": INDEX, ".bin": "pytorch_model.bin.index.json"}
# What trainers save beside weights.
NOT_WEIGHTS = frozenset(
    {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scheduler.pt", "scaler.pt", "rng_state.pt"}
)


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weight files of one folder under one load format.

    files: to be read, in this order; empty for "dummy". left_out: weight files that lie there too and are not read. kind: ".safetensors",
    ".bin", ".pt" or "".
    """

    folder: Path
    kind: str
    files: tuple[Path, ...]
    left_out: tuple[Path, ...] = ()

    @property
    def pickled(self) -> bool:
        """Whether names and shapes can only be known by unpickling."""
        return self.kind in (".bin", ".pt")

    @property
    def note(self) -> str:
        """What a reader should know about the choice, or ""."""
        notes = []
        if self.pickled:
            names = ", ".join(file.name for file in self.files[:3])
            notes.append(
                f"{names}: no header, so it cannot be inspected without unpickling; names and shapes come from torch's weights_only "
                "unpickler, which runs no code, and no tensor data was read"
            )
        if self.left_out:
            notes.append(f"not read: {', '.join(file.name for file in self.left_out[:5])}; {self.kind or 'dummy'} weights are used")
        return "; ".join(notes)


def weight_files(folder: Path, load_format: str, names: Iterable[str] | None = None) -> WeightFiles:
    """Choose the weight files of `folder`.

    Args:
        names: the files to choose from, where not all of them lie in `folder` yet; None is what lies there.

    Raises:
        CheckpointFileError: none for this format (the message names what is there), or a file that an index names is missing.
    """
    here = {file.name for file in folder.iterdir() if file.is_file()} if names is None else set(names)
    there = {kind: _files(folder, kind, here) for kind in KINDS["auto"]}
    for kind in KINDS[load_format]:
        if not there[kind]:
            continue
        files = _chosen(folder, kind, there[kind], here)
        rest = [file for found in there.values() for file in found if file not in files]
        return WeightFiles(folder, kind, tuple(files), tuple(rest))
    every = tuple(file for found in there.values() for file in found)
    if load_format == "dummy":
        return WeightFiles(folder, "", (), every)
    wanted = ", ".join(f"*{kind}" for kind in KINDS[load_format])
    found = ", ".join(file.name for file in every) or ", ".join(sorted(here)[:10]) or "nothing"
    raise CheckpointFileError(
        f"Cannot find any model weights with `{folder}`: load_format {load_format!r} reads {wanted}; there: {found}"
        + ("; load_format 'auto' reads what is there" if every else ""),
        code="load-format-conflict" if every else "no-weights",
        evidence={"load config: load_format": load_format, "files": found},
    )


def _files(folder: Path, kind: str, here: set[str]) -> list[Path]:
    names = [name for name in here if name.endswith(kind) and name not in NOT_WEIGHTS and not name.startswith(".") and "/" not in name]
    return [folder / name for name in sorted(names, key=lambda name: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", name)])]


def _chosen(folder: Path, kind: str, there: list[Path], here: set[str]) -> list[Path]:
    index = folder / INDEXES.get(kind, "")
    if kind in INDEXES and index.is_file():
        named = sorted(set(read_index(index).values()))
        missing = [name for name in named if name not in here]
        if missing:
            raise CheckpointFileError(
                f"{folder / missing[0]} is missing, but {index.name} names it ({len(missing)} of {len(named)} files missing); "
                "fetch it again",
                code="missing-shard",
                evidence={f"{index.name}: weight_map": missing[0], f"files: {missing[0]}": "absent"},
            )
        return [folder / name for name in named]
    # Mistral's own layout of the same weights, beside the usual one
    usual = [file for file in there if not file.name.startswith("consolidated")]
    return usual or there
