"""Run commands on this machine, N at a time, each with a GPU of its own where there are GPUs.

What enters: `Task`s. What leaves: the exit status of each, as they end. It does not know notebooks; nothing runs in the caller's event
loop, so it works inside a notebook as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 30.0  # for a child that was told to stop to write its record
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Task:
    """arguments: of the Python interpreter. log: file for all that it prints."""

    arguments: tuple[str, ...]
    log: Path


def run_local(tasks: Sequence[Task], jobs: int | None = None, threads: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield (index of a task, its exit status) as tasks end; closing the iterator stops those that still run.

    Args:
        jobs: tasks at a time; None is one per visible GPU, else one.
        threads: OMP_NUM_THREADS of a task. None leaves the environment alone for one task at a time, and shares the cores among several.
    """
    gpus = visible_gpus()
    places = max(1, len(gpus)) if jobs is None else jobs
    if gpus and places > len(gpus):
        warnings.warn(f"{places} runs at a time share {len(gpus)} GPUs, so their times are those of a shared device", stacklevel=2)
    if threads is None and places > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, (os.cpu_count() or 1) // places)
    free = list(reversed(range(places)))
    waiting = list(reversed(list(enumerate(tasks))))
    running: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}  # by place
    try:
        while waiting or running:
            while waiting and free:
                index, task = waiting.pop()
                place = free.pop()
                running[place] = index, _start(task, child_environment(threads, gpus[place % len(gpus)] if gpus else None))
            for place, (index, child) in list(running.items()):
                if (status := child.poll()) is not None:
                    del running[place]
                    free.append(place)
                    yield index, status
            if running:
                time.sleep(POLL_S)
    finally:
        _stop([child for _, child in running.values()])


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name: its own entries where it is set, else every CUDA device."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def child_environment(threads: int | None, gpu: str | None, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a child: this package importable from any folder, its threads, its GPU."""
    path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    child = {**environment, "PYTHONPATH": path}
    if threads is not None:
        child |= {"OMP_NUM_THREADS": str(threads)}
    return child if gpu is None else {**child, "CUDA_VISIBLE_DEVICES": gpu}


def _start(task: Task, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with task.log.open("wb") as stream:
        # A session of its own: Ctrl-C reaches the caller alone, which then tells each child once.
        return subprocess.Popen(
            [sys.executable, *task.arguments], stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )


def _stop(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.terminate()
    deadline = time.monotonic() + GRACE_S
    for child in children:
        try:
            child.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
