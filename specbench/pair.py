"""Open a verifier and a draft: their configs and tensor headers, no weights.

What enters: local folders or hub ids. What leaves: a `Pair` of `Checkpoint`s. It does not know policies, and decides nothing: it
only reports what the files say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .checkpoint.files import TensorInfo, read_json
from .checkpoint.hub import open_repository, same_cache
from .checkpoint.load_config import LoadConfig, parse_load_config
from .checkpoint.load_formats import headers
from .checkpoint.weight_files import KINDS, WeightFiles, weight_files
from .errors import CheckpointFileError, ConfigError
from .speculative import SpeculativeConfig, check_speculative_config, parse_speculative_config


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What one checkpoint's files say.

    name: as given by the user. path: local folder; of a hub checkpoint the cache's snapshot, which weight files reach when they are loaded
    (`checkpoint.hub.materialize`). revision: resolved commit of a hub checkpoint, None for a folder.
    config: config.json. quantization: the section that says how weights are stored, or None; quantization_source: its file and key.
    tensors: headers by name. files: the weight files that they describe. opened_with: the load config that chose them.
    """

    name: str
    path: Path
    revision: str | None
    config: dict[str, Any] = field(repr=False)
    quantization: dict[str, Any] | None = field(repr=False)
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    quantization_source: str = ""
    files: WeightFiles | None = field(default=None, repr=False)
    opened_with: LoadConfig = field(default_factory=LoadConfig, repr=False)

    @property
    def note(self) -> str:
        """What is odd about the weight files: pickles, which have no header, or files that are not read."""
        return self.files.note if self.files else ""


@dataclass(frozen=True, slots=True)
class Pair:
    """A verifier and the draft that is to speculate for it.

    verifier_load: how the verifier's weights are read. draft_load: the same for the draft; None is unset, and a policy says what that
    means. speculative: vLLM's dict, as it was given.
    """

    verifier: Checkpoint
    draft: Checkpoint
    verifier_load: LoadConfig = field(default_factory=LoadConfig)
    draft_load: LoadConfig | None = None
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)


def open_pair(
    verifier: str | Path,
    draft: str | Path | None = None,
    *,
    revision: str | None = None,
    draft_revision: str | None = None,
    speculative_config: SpeculativeConfig | dict[str, Any] | str | None = None,
    load_config: LoadConfig | Mapping[str, Any] | None = None,
    draft_load_config: LoadConfig | Mapping[str, Any] | None = None,
) -> Pair:
    """Read configs and tensor headers of both checkpoints.

    Args:
        verifier: folder, hub id ("RedHatAI/Qwen3-8B-quantized.w4a16"), or a .gguf file (expanded to bf16 once, in the cache).
        draft: folder or hub id of an EAGLE-3 draft; None takes `speculative_config["model"]`.
        revision: commit, tag or branch of the verifier on the hub.
        draft_revision: the same for the draft.
        speculative_config: vLLM's dict (or its JSON text), verbatim; its model, revision and draft_load_config stand in for arguments that
        are not
            given, its quantization for `resolve`'s override.
        load_config: how the verifier's weights are found and read, as vLLM's dict; None is all defaults.
        draft_load_config: the same for the draft; None is unset: the verifier's counts.

    Raises:
        ConfigError: no draft, the draft is the verifier, or a load or speculative config with an unknown key, a wrong value or a
        contradiction. CheckpointFileError: files missing or damaged.
        CheckpointError: weights only in a pickle, and one that asks for more than tensors.
        DownloadError: a hub id that cannot be fetched.
    """
    config = parse_speculative_config(speculative_config)
    draft = config.model if draft is None else draft
    if draft_revision is not None and config.revision not in (None, draft_revision):
        raise ConfigError(f"draft_revision is {draft_revision!r}, and revision in speculative_config {config.revision!r}; name one of them")
    draft_revision = config.revision if draft_revision is None else draft_revision
    draft_load_config = config.draft_load_config if draft_load_config is None else draft_load_config
    if not draft or str(draft) == str(verifier):
        raise ConfigError(
            f"draft is {str(draft)!r} and verifier is {str(verifier)!r}: an EAGLE-3 draft is a checkpoint of its own, with fc.weight and "
            f"one "
            "or more decoder layers that read 2 x hidden",
            code="no-draft",
            evidence={"draft": draft, "verifier": verifier},
        )
    verifier_load = parse_load_config(load_config)
    draft_load = None if draft_load_config is None else parse_load_config(draft_load_config, "draft_load_config")
    opened = open_checkpoint(verifier, revision, verifier_load)
    pair = Pair(opened, open_checkpoint(draft, draft_revision, draft_load or verifier_load), verifier_load, draft_load, config)
    check_speculative_config(config, pair)
    return pair


def open_checkpoint(source: str | Path, revision: str | None = None, load_config: LoadConfig | None = None) -> Checkpoint:
    """Read config.json and tensor headers of one checkpoint (see `open_pair`).

    A folder whose weights are pickles only has no headers: names and shapes then come from torch's weights_only unpickler, without
    tensor data.
    """
    load_config = load_config or LoadConfig()
    if load_config.load_format == "dummy":  # what lies there still says how the model is built
        load_config = replace(load_config, load_format="auto")
    try:
        path, commit, tensors, files = _locate(source, revision, load_config)
    except CheckpointFileError:
        if load_config.load_format == "auto":
            raise
        # Nothing for this format: another policy may read what is there, and loading under this one will say so.
        load_config = replace(load_config, load_format="auto")
        path, commit, tensors, files = _locate(source, revision, load_config)
    config = read_json(path / "config.json")
    section, found = quantization_section(path, config)
    return Checkpoint(str(source), path, commit, config, section, tensors, found, files, load_config)


Located = tuple[Path, str | None, Mapping[str, TensorInfo], WeightFiles]  # folder, commit, headers, weight files


def _locate(source: str | Path, revision: str | None, load_config: LoadConfig) -> Located:
    folder = Path(source)
    if folder.suffix == ".gguf" and folder.is_file():
        from .through_transformers import plain_gguf

        folder = plain_gguf(folder)
    if folder.is_dir():
        read_json(folder / "config.json")  # no checkpoint without it, whatever else is missing
        files = weight_files(folder, load_config.load_format)
        return folder, None, headers(files), files
    folder, tensors = open_repository(str(source), revision, load_config)
    return folder, folder.name, tensors, tensors.weights


def read_with(checkpoint: Checkpoint, load_config: LoadConfig) -> Checkpoint:
    """`checkpoint` as `load_config` finds it: in that config's hub cache, with the headers of the files that it reads.

    Raises:
        CheckpointFileError: no weight files for its load format.
        DownloadError: a hub checkpoint that its cache lacks and that cannot be fetched.
    """
    if load_config.load_format == "dummy":
        return checkpoint
    if checkpoint.revision is not None:
        same = KINDS[load_config.load_format] == KINDS[checkpoint.opened_with.load_format] and same_cache(checkpoint.path, load_config)
        return checkpoint if same else open_checkpoint(checkpoint.name, checkpoint.revision, load_config)
    files = weight_files(checkpoint.path, load_config.load_format)
    return checkpoint if files == checkpoint.files else replace(checkpoint, files=files, tensors=headers(files), opened_with=load_config)


def quantization_section(folder: Path, config: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """What a checkpoint declares about its weights, and where.

    `quantization_config` (or `compression_config`) of config.json; else ModelOpt's hf_quant_config.json, whose `quantization` object
    becomes the section with quant_method "modelopt". An empty object, or one whose algorithm is null, declares nothing.
    """
    for key in ("quantization_config", "compression_config"):
        section = config.get(key)
        if section is not None and not isinstance(section, dict):
            said = {f"config.json: {key}": repr(section)[:80]}
            raise ConfigError(f"{folder / 'config.json'}: {key} is {section!r}, not an object", code="config-value", evidence=said)
        if section:
            return section, f"config.json: {key}"
    if (folder / "hf_quant_config.json").is_file():
        nested = read_json(folder / "hf_quant_config.json").get("quantization")
        if isinstance(nested, dict) and nested.get("quant_algo"):
            return {"quant_method": "modelopt", **nested}, "hf_quant_config.json: quantization"
    return None, ""


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a verifier's config: multimodal ones nest it under `text_config`."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config
