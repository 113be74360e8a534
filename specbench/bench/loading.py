"""What loading costs: extra memory over what is kept, and speed beside plain reading of the same file.

    python -m specbench.bench.loading --gigabytes 1

What enters: a size. What leaves: a table, and one JSON line after it. A synthetic verifier and draft of about that size each are written
to a temporary folder and loaded in fresh processes, each beside plain reads of its own file. It measures no decoding, and nothing of a hub.

Memory: highest resident memory while a load runs above that before it (Linux: VmHWM), over the bytes of the loaded parameters. Speed: bytes
of the file over seconds, of the load, of copying the file into new memory (what any loader must do), and of reading it through one small
buffer; the ratios also in CPU seconds, which other processes disturb less. Warm, the copy is the bound: new memory costs more than the
bytes. Cold: the file's pages are dropped before each step, which is checked; three turns let each step come first once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import SpecbenchError
from .memory import peak, reset_peak, resident
from .sweep_local import child_environment

MEMORY_TARGET, SPEED_TARGET = 1.2, 0.6
STEP = 128  # hidden sizes are multiples of it: heads of 128
LAYERS, VOCAB, DRAFT_WIDTH = 6, 8, 8  # of the verifier; rows of embeddings and of the draft's MLP in hidden sizes. Both models: 50 hidden^2
BUFFER = 1 << 20


class LoadingError(SpecbenchError, RuntimeError):
    """A measuring process did not come to its end."""


def write_pair(folder: Path, gigabytes: float) -> tuple[Path, Path]:
    """A verifier and a draft, bf16, each of at least `gigabytes` (10^9 bytes), with random weights: wide and shallow."""
    hidden = next(h for h in range(STEP, 1000 * STEP, STEP) if _bytes(_draft_shapes(h)) >= gigabytes * 1e9)
    layer = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": DRAFT_WIDTH * hidden, "num_attention_heads": hidden // 128,
        "num_key_value_heads": hidden // 128, "head_dim": 128, "vocab_size": VOCAB * hidden, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB * hidden, hidden), "model.norm.weight": (hidden,)}
    for i in range(LAYERS):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in _layer_shapes(hidden, hidden, hidden).items()}
    verifier = {
        **layer, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS, "intermediate_size": hidden, "dtype": "bfloat16",
        "tie_word_embeddings": True, "eos_token_id": 2,
    }  # fmt: skip
    draft = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": VOCAB * hidden, "dtype": "bfloat16",
        "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "transformer_layer_config": {**layer, "num_hidden_layers": 1},
    }  # fmt: skip
    return _write(folder / "verifier", verifier, shapes), _write(folder / "draft", draft, _draft_shapes(hidden))


def _layer_shapes(hidden: int, inputs: int, inner: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj.weight": (hidden, inputs) for name in "qkv"}
    shapes |= {"self_attn.o_proj.weight": (hidden, hidden), "mlp.down_proj.weight": (hidden, inner)}
    shapes |= {f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    return shapes | {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}


def _draft_shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    layer = _layer_shapes(hidden, 2 * hidden, DRAFT_WIDTH * hidden)
    shapes: dict[str, tuple[int, ...]] = {f"layers.0.{name}": shape for name, shape in layer.items()}
    shapes |= {"fc.weight": (hidden, 3 * hidden), "layers.0.hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    return shapes | {f"{name}.weight": (VOCAB * hidden, hidden) for name in ("lm_head", "embed_tokens")}


def _bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(2 * math.prod(shape) for shape in shapes.values())


def _write(folder: Path, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """A safetensors file written piece by piece, so that making it takes no memory of its size."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    block = np.random.default_rng(0).normal(0, 0.02, BUFFER).astype(np.float32)
    piece = (block.view(np.uint32) >> 16).astype(np.uint16).tobytes()  # bf16: the upper half of a float32
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, end, len(piece)):
            file.write(piece[: min(len(piece), end - start)])
        file.flush()
        os.fsync(file.fileno())  # only clean pages can be dropped
    return folder


# --- one turn, in a process of its own


def measure(which: str, cold: bool, verifier: str, draft: str, load_config: dict[str, Any], first: int = 0) -> dict[str, float] | None:
    """Read the file of the "verifier" or "draft", copy it, load it. None where `cold` was asked for and pages cannot be dropped.

    first: which of the three comes first: the disk, or the machine around a virtual one, may remember what was read.

    Returns: for each of "read", "copy", "load": seconds and cpu_seconds; file_bytes; and of the load extra_bytes and kept_bytes, where the
    system tells.
    """
    import torch

    from ..load import load_draft
    from ..pair import open_pair
    from ..verifier import load_verifier

    file = Path(verifier if which == "verifier" else draft) / "model.safetensors"
    pair = open_pair(verifier, draft, load_config=load_config)
    loader: Callable[..., Any] = load_verifier if which == "verifier" else load_draft
    jobs: dict[str, Callable[[], Any]] = {
        "read": lambda: _read(file),
        "copy": lambda: _copy(file),
        "load": lambda: loader(pair, device="cpu"),
    }
    torch.zeros(1)
    facts: dict[str, float] = {"file_bytes": file.stat().st_size}
    for name in [*jobs, *jobs][first : first + len(jobs)]:
        if cold and not drop_pages(file):
            return None
        before = resident() if reset_peak() else None
        cpu, start = time.process_time(), time.perf_counter()
        kept = jobs[name]()
        facts |= {f"{name}_seconds": time.perf_counter() - start, f"{name}_cpu_seconds": time.process_time() - cpu}
        highest = peak()
        if name == "load" and before is not None and highest is not None:
            storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in kept.parameters()}
            facts |= {"extra_bytes": highest - before, "kept_bytes": sum(storages.values())}
        del kept
    return facts


def _copy(file: Path) -> bytes:
    with file.open("rb", buffering=0) as opened:
        return opened.read()


def _read(file: Path) -> None:
    buffer = bytearray(BUFFER)
    with file.open("rb", buffering=0) as opened:
        while opened.readinto(buffer):
            pass


def drop_pages(file: Path) -> bool:
    """Drop `file` from the page cache; whether that worked (it does not on every file system)."""
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            os.preadv(opened.fileno(), [bytearray(4096)], file.stat().st_size // 2, os.RWF_NOWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False


# --- all of them


def run(folder: Path, gigabytes: float, repeats: int, load_config: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Every figure, medians over `repeats` turns; ratios are taken within a turn. Cold figures are absent where pages cannot be dropped."""
    verifier, draft = write_pair(folder, gigabytes)
    results: dict[str, Any] = {"gigabytes": gigabytes, "repeats": repeats, "load_config": load_config}
    for which, state in ((which, state) for which in ("verifier", "draft") for state in ("warm", "cold")):
        request = {"which": which, "cold": state == "cold", "verifier": str(verifier), "draft": str(draft), "load_config": load_config}
        turns = [_child({**request, "first": turn % 3}) for turn in range(repeats)]
        rows = [_figures(turn) for turn in turns if turn is not None]
        if len(rows) < repeats:
            say(f"{which:9}{state:5} pages cannot be dropped here: not measured")
            continue
        figures = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        results[f"{which}_{state}"] = figures
        say(f"{which:9}{state:5} " + "  ".join(f"{name} {value:.2f}" for name, value in figures.items()))
    return results


def _figures(turn: dict[str, float]) -> dict[str, float]:
    row = {f"{name}_gb_per_s": turn["file_bytes"] / turn[f"{name}_seconds"] / 1e9 for name in ("load", "copy", "read")}
    row |= {f"load_over_{name}": turn[f"{name}_seconds"] / turn["load_seconds"] for name in ("copy", "read")}
    row |= {f"load_over_{name}_cpu": turn[f"{name}_cpu_seconds"] / turn["load_cpu_seconds"] for name in ("copy", "read")}
    return row | ({"extra_over_kept": turn["extra_bytes"] / turn["kept_bytes"]} if "extra_bytes" in turn else {})


def _child(request: dict[str, Any]) -> dict[str, float] | None:
    command = [sys.executable, "-m", "specbench.bench.loading", "--measure", json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(None, None), check=False)
    if done.returncode != 0:
        raise LoadingError(f"measuring {request['which']} ended with status {done.returncode}:\n{done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: list[str] | None = None) -> int:
    """Run from a shell; returns 0 where both targets hold in every state that was measured, else 1. Speed is judged beside the copy."""
    parser = argparse.ArgumentParser(prog="python -m specbench.bench.loading", description="Measure what loading costs.")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of each of the two synthetic checkpoints (1e9 bytes)")
    parser.add_argument("--repeats", type=int, default=3, help="turns; medians are shown")
    parser.add_argument("--load-config", type=json.loads, default={}, help="vLLM's LoadConfig as JSON")
    parser.add_argument("--folder", type=Path, help="where the checkpoints lie during the run; default: the temporary folder")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        sys.stdout.write(json.dumps(measure(**json.loads(options.measure))) + "\n")
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="specbench-loading-") as folder:
        results = run(Path(folder), options.gigabytes, options.repeats, options.load_config, _say)
    states = [value for value in results.values() if isinstance(value, dict) and "load_over_copy" in value]
    results["memory_ok"] = all(state.get("extra_over_kept", 0) < MEMORY_TARGET for state in states)
    results["speed_ok"] = all(state["load_over_copy"] >= SPEED_TARGET for state in states)
    _say(json.dumps(results))
    return 0 if results["memory_ok"] and results["speed_ok"] else 1


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
