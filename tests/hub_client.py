"""What tests do with hub ids, in a process of its own: huggingface_hub reads HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE when imported."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

OPENED: dict[str, Any] = {}


class Client:
    """A process with its own environment; call it with a function of this module and its arguments."""

    def __init__(self, **environment: str) -> None:
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=_start, initargs=(environment,))

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._pool.submit(function, *args, **kwargs).result(timeout=120)

    def close(self) -> None:
        self._pool.submit(os._exit, 0)  # an interpreter with torch takes seconds to tidy up before it ends
        self._pool.shutdown()


def _start(environment: dict[str, str]) -> None:
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        os.environ.pop(name, None)
    os.environ.update(environment, HF_HUB_DISABLE_PROGRESS_BARS="1", NO_PROXY="127.0.0.1,localhost")
    import torch

    torch.set_num_threads(1)


def open_one(repo: str, revision: str | None = None, **load_config: Any) -> dict[str, Any]:
    """Open a checkpoint and say what came of it."""
    from specbench.checkpoint.load_config import LoadConfig
    from specbench.pair import open_checkpoint

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint = open_checkpoint(repo, revision, LoadConfig(**load_config))
    OPENED[repo] = checkpoint
    return {
        "revision": checkpoint.revision,
        "path": checkpoint.path,
        "names": list(checkpoint.tensors),
        "files": sorted(path.name for path in checkpoint.path.iterdir()),
        "hidden_size": checkpoint.config.get("hidden_size"),
        "quantization": checkpoint.quantization,
        "warnings": [str(warning.message) for warning in caught],
    }


def headers(repo: str, *names: str) -> dict[str, tuple[Any, ...]]:
    """Headers of an opened checkpoint: (dtype, shape, file name, begin, end) by name; of all tensors where no names are given."""
    tensors = OPENED[repo].tensors
    found = [tensors[name] for name in names] if names else tensors.values()
    return {info.name: (info.dtype, info.shape, info.file.name, info.begin, info.end) for info in found}


def open_two(verifier: str, draft: str, **kwargs: Any) -> tuple[str, str]:
    """Open a pair and return both revisions."""
    from specbench import open_pair

    pair = OPENED["pair"] = open_pair(verifier, draft, **kwargs)
    return pair.verifier.revision, pair.draft.revision


def settings() -> dict[str, Any]:
    """Resolve the opened pair."""
    from specbench import resolve

    plan = resolve(OPENED["pair"])
    return {name: plan[name] for name in ("hidden_size", "draft_vocab_size", "target_hidden_size", "embed_tokens")}


def load(which: str) -> dict[str, str]:
    """Load the "draft" or "verifier" of the opened pair, and return a hash of each parameter."""
    import specbench as sb

    model = {"draft": sb.load_draft, "verifier": sb.load_verifier}[which](OPENED["pair"], device="cpu")
    return {name: hashlib.sha256(p.detach().contiguous().float().numpy().tobytes()).hexdigest() for name, p in model.named_parameters()}


def token(value: str | None) -> None:
    """Set or unset HF_TOKEN, which is read at each request."""
    if value is None:
        os.environ.pop("HF_TOKEN", None)
    else:
        os.environ["HF_TOKEN"] = value


def whole(folder: Path) -> list[str]:
    """Names of files in a snapshot folder."""
    return sorted(path.name for path in folder.iterdir())


def diagnosed(verifier: str, draft: str, **options: Any) -> dict[str, Any]:
    """What the doctor says: codes with their severity, sentences, and the report's facts."""
    import specbench as sb

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = sb.diagnose(verifier, draft, **options)
    codes = {finding.code: finding.severity for finding in report}
    sentences = {finding.code: finding.sentence for finding in report}
    sides = {"verifier": dict(report.verifier), "draft": dict(report.draft)}
    return {"codes": codes, "sentences": sentences, "readable": report.readable, **sides}
