"""Open a verifier and a draft: their configs and tensor headers, no weights.

What enters: local folders or hub ids. What leaves: a `Pair` of `Checkpoint`s. It does not know policies, and decides nothing: it
only reports what the files say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .checkpoint.files import TensorInfo, read_headers, read_json
from .errors import ConfigError, DownloadError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What one checkpoint's files say.

    name: as given by the user. path: local folder. revision: resolved commit of a hub checkpoint, None for a folder.
    config: config.json. quantization: its `quantization_config` section, or None. tensors: headers by name.
    """

    name: str
    path: Path
    revision: str | None
    config: dict[str, Any] = field(repr=False)
    quantization: dict[str, Any] | None = field(repr=False)
    tensors: dict[str, TensorInfo] = field(repr=False)


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
    path, commit = Path(source), None
    if not path.is_dir():
        path, commit = _download(str(source), revision)
    config = read_json(path / "config.json")
    section = config.get("quantization_config")
    if section is not None and not isinstance(section, dict):
        raise ConfigError(f"{path / 'config.json'}: quantization_config is {section!r}, not an object")
    return Checkpoint(str(source), path, commit, config, section or None, read_headers(path))


def _download(repo: str, revision: str | None) -> tuple[Path, str]:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.txt"]
    try:
        folder = Path(huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except HFValidationError:
        raise ConfigError(f"{repo!r} is neither a folder here nor a hub id (organisation/name)") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise DownloadError(
            f"{repo!r} is not a folder here, and could not be fetched from the hub ({type(error).__name__}: {str(error).splitlines()[0]}); "
            "check the name, the network and HF_TOKEN, or give a local folder"
        ) from error
    return folder, folder.name
