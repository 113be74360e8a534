"""The facts that a number depends on, gathered before the run: command, versions, machine, checkpoints, prompts.

What enters: a run's parameters, checkpoints and prompts. What leaves: a dictionary for provenance.json. It does not know rows or figures.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..pair import Checkpoint
from .prompts import Prompt, as_prompts
from .records import now

PACKAGES = ("specbench", "torch", "transformers", "compressed-tensors", "safetensors", "huggingface_hub", "numpy", "pandas", "pyarrow")
ENVIRONMENT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
WHOLE_FILE_BYTES = 1 << 30
PACKAGE = Path(__file__).resolve().parents[1]


def provenance(parameters: Mapping[str, Any], checkpoints: Mapping[str, Checkpoint], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What is known before a run.

    Args:
        parameters: the run's own settings, as given and as resolved.
        checkpoints: by role ("verifier", "draft").
        prompts: what will be asked.

    Returns:
        argv, parameters, started (UTC), python, packages, git, machine, environment, checkpoints, prompts; JSON values only.
    """
    return {
        "argv": sys.argv,
        "parameters": dict(parameters),
        "started": now(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git": git_state(),
        "machine": machine(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "checkpoints": {role: describe_checkpoint(checkpoint) for role, checkpoint in checkpoints.items()},
        "prompts": as_prompts(prompts).describe(),
    }


def describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """Name, folder, hub revision, quantization section and file hashes of a checkpoint.

    Of a hub checkpoint the revision (a commit) says what its files are, so only config.json is hashed. Of a folder, files up to 1 GiB are
    hashed whole (sha256); of larger safetensors files the header is hashed and the size kept ("header_sha256"), which tells apart layouts
    but not two trainings of one layout.
    """
    weights = {info.file for info in checkpoint.tensors.values()} if checkpoint.revision is None else set()
    files = [checkpoint.path / "config.json", *sorted(weights)]
    return {
        "name": checkpoint.name,
        "path": str(checkpoint.path),
        "revision": checkpoint.revision,
        "quantization_config": checkpoint.quantization,
        "files": {file.name: _hash_file(file) for file in files},
    }


def git_state() -> dict[str, Any] | None:
    """{"sha", "dirty"} of the checkout that holds this package; None where it is not tracked by git, or git is missing."""
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    sha, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    return None if sha is None or changes is None else {"sha": sha.strip(), "dirty": bool(changes.strip())}


def machine() -> dict[str, Any]:
    """Operating system, CPU with what torch uses of its vector instructions (two processors of one name may differ), its usable cores and
    torch threads, and each visible GPU."""
    import torch

    from ..quant.products import multiplies_bf16

    gpus = []
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(i)
            gpus.append({"name": device.name, "memory_bytes": device.total_memory, "capability": [device.major, device.minor]})
    return {
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_bf16": multiplies_bf16(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpus": gpus,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(PACKAGE), *arguments], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _hash_file(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= WHOLE_FILE_BYTES or file.suffix != ".safetensors":
            return {"bytes": size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
        start = stream.read(8)
        return {"bytes": size, "header_sha256": hashlib.sha256(start + stream.read(struct.unpack("<Q", start)[0])).hexdigest()}
