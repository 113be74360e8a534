"""Open a verifier and a draft: their configs and tensor headers, no weights.

What enters: local folders or hub ids. What leaves: a `Pair` of `Checkpoint`s. It does not know policies, and decides nothing: it
only reports what the files say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .checkpoint.files import TensorInfo, read_headers, read_json
from .checkpoint.hub import open_repository
from .errors import ConfigError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What one checkpoint's files say.

    name: as given by the user. path: local folder; of a hub checkpoint the cache's snapshot, which weight files reach when they are loaded
    (`checkpoint.hub.materialize`). revision: resolved commit of a hub checkpoint, None for a folder.
    config: config.json. quantization: the section that says how weights are stored, or None; quantization_source: its file and key.
    tensors: headers by name.
    """

    name: str
    path: Path
    revision: str | None
    config: dict[str, Any] = field(repr=False)
    quantization: dict[str, Any] | None = field(repr=False)
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    quantization_source: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """A verifier and the draft that is to speculate for it."""

    verifier: Checkpoint
    draft: Checkpoint


def open_pair(verifier: str | Path, draft: str | Path, *, revision: str | None = None, draft_revision: str | None = None) -> Pair:
    """Read configs and tensor headers of both checkpoints.

    Args:
        verifier: folder, or hub id ("RedHatAI/Qwen3-8B-quantized.w4a16").
        draft: folder or hub id of an EAGLE-3 draft.
        revision: commit, tag or branch of the verifier on the hub.
        draft_revision: the same for the draft.

    Raises:
        ConfigError: no draft, or the draft is the verifier.
        CheckpointFileError: files missing or damaged.
        DownloadError: a hub id that cannot be fetched.
    """
    if not draft or str(draft) == str(verifier):
        raise ConfigError(
            f"draft is {str(draft)!r} and verifier is {str(verifier)!r}: an EAGLE-3 draft is a checkpoint of its own, with fc.weight and one "
            "or more decoder layers that read 2 x hidden"
        )
    return Pair(open_checkpoint(verifier, revision), open_checkpoint(draft, draft_revision))


def open_checkpoint(source: str | Path, revision: str | None = None) -> Checkpoint:
    """Read config.json and tensor headers of one checkpoint (see `open_pair`)."""
    path, commit, headers = Path(source), None, None
    if not path.is_dir():
        path, headers = open_repository(str(source), revision)
        commit = path.name
    config = read_json(path / "config.json")
    section, found = quantization_section(path, config)
    return Checkpoint(str(source), path, commit, config, section, read_headers(path) if headers is None else headers, found)


def quantization_section(folder: Path, config: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """What a checkpoint declares about its weights, and where.

    `quantization_config` (or `compression_config`) of config.json; else ModelOpt's hf_quant_config.json, whose `quantization` object becomes the section with
    quant_method "modelopt". An empty object, or one whose algorithm is null, declares nothing.
    """
    for key in ("quantization_config", "compression_config"):
        section = config.get(key)
        if section is not None and not isinstance(section, dict):
            raise ConfigError(f"{folder / 'config.json'}: {key} is {section!r}, not an object")
        if section:
            return section, f"config.json: {key}"
    if (folder / "hf_quant_config.json").is_file():
        nested = read_json(folder / "hf_quant_config.json").get("quantization")
        if isinstance(nested, dict) and nested.get("quant_algo"):
            return {"quant_method": "modelopt", **nested}, "hf_quant_config.json: quantization"
    return None, ""
