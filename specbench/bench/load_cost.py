"""What loading a draft costs beside a loaded verifier: seconds and extra memory, in a process of its own.

What enters: a pair. What leaves: a `LoadCost`. It does not know what is decoded later. A fresh process keeps memory that was freed
earlier out of the figure; the files may lie in the page cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

from ..errors import SpecbenchError
from ..pair import Checkpoint, Pair, open_pair
from .memory import peak, reset_peak, resident, settle
from .sweep_local import child_environment


class LoadCostError(SpecbenchError, RuntimeError):
    """The measuring process did not come to its end."""


@dataclass(frozen=True, slots=True)
class LoadCost:
    """seconds: wall clock of `load_draft`. host_peak_bytes: highest resident memory while it ran, above that before it; None where the
    system does not tell (outside Linux). device_peak_bytes: the same of CUDA's allocator; None on the CPU. file_bytes: the draft's weights.
    """

    seconds: float
    host_peak_bytes: int | None
    device_peak_bytes: int | None
    file_bytes: int


def draft_load_cost(pair: Pair, *, policy: str = "draft", device: str = "auto", dtype: str = "auto") -> LoadCost:
    """Load verifier, then draft, in a new interpreter and measure the second step.

    Raises:
        LoadCostError: that process failed; its last lines are in the text.
    """
    request = {"verifier": _source(pair.verifier), "draft": _source(pair.draft), "policy": policy, "device": device, "dtype": dtype}
    command = [sys.executable, "-m", "specbench.bench.load_cost", json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(None, None), check=False)
    if done.returncode != 0:
        raise LoadCostError(f"measuring the load of {pair.draft.name} ended with status {done.returncode}:\n{done.stderr.strip()[-2000:]}")
    return LoadCost(**json.loads(done.stdout.splitlines()[-1]))


def measure(pair: Pair, policy: str, device: str, dtype: str) -> LoadCost:
    """The measurement itself, in this process."""
    import torch

    from ..load import load_draft
    from ..verifier import load_verifier

    verifier = load_verifier(pair, device=device, dtype=dtype)
    cuda = verifier.device.type == "cuda"
    settle()
    before, can_reset = resident(), reset_peak()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
    start = time.perf_counter()
    draft = load_draft(pair, policy, device=device, dtype=dtype, verifier=verifier)
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    highest = peak() if can_reset else None
    file_bytes = sum(file.stat().st_size for file in {info.file for info in pair.draft.tensors.values()})
    del draft
    return LoadCost(
        seconds,
        None if highest is None or before is None else max(highest - before, 0),
        torch.cuda.max_memory_allocated() - allocated if cuda else None,
        file_bytes,
    )


def _source(checkpoint: Checkpoint) -> list[str | None]:
    return [str(checkpoint.path), None] if checkpoint.revision is None else [checkpoint.name, checkpoint.revision]


def main() -> None:
    """Measure what the JSON argument asks for, and write the result as the last line."""
    request = json.loads(sys.argv[1])
    (verifier, revision), (draft, draft_revision) = request["verifier"], request["draft"]
    pair = open_pair(verifier, draft, revision=revision, draft_revision=draft_revision)
    sys.stdout.write(json.dumps(asdict(measure(pair, request["policy"], request["device"], request["dtype"]))) + "\n")


if __name__ == "__main__":
    main()
