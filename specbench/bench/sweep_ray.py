"""Run commands on a Ray cluster.

What enters: `sweep_local.Task`s and an address. What leaves: the exit status of each, as they end. It does not know notebooks. Each task
runs in the worker's own Python, which has to have specbench installed; what tasks read and write has to lie on storage that all nodes see,
and every worker checks that before it starts anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .sweep_local import ROOT, Task


def run_on_ray(
    tasks: Sequence[Task], address: str, witness: Path, jobs: int | None = None, threads: int | None = None
) -> Iterator[tuple[int, int]]:
    """Yield (index of a task, its exit status) as tasks end; closing the iterator stops those that still run.

    Args:
        address: "host:port" of a cluster, "auto" for the one that this machine belongs to, "local" for one on this machine alone.
        witness: a file that every node must see with the same content.
        jobs: tasks at a time; None is as many as the cluster has room for.
        threads: CPUs that a task takes, and its OMP_NUM_THREADS; None is 1. It takes one GPU where the cluster has GPUs.

    Raises:
        ConfigError: Ray is not installed, no cluster answers, no node has that many CPUs, or a node does not see the witness.
    """
    if find_spec("ray") is None:
        raise ConfigError("running on a Ray cluster needs Ray, which is not installed here; next: pip install 'specbench[ray]'")
    ray: Any = import_module("ray")
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(address=address, log_to_driver=False, include_dashboard=False if address == "local" else None)
        except (ConnectionError, ValueError) as error:
            raise ConfigError(f"no Ray cluster at {address!r}: {error}; start one with `ray start --head`, or use --ray local") from error
    try:
        yield from _run(ray, tasks, witness, jobs, threads or 1)
    finally:
        if started:
            ray.shutdown()


def _run(ray: Any, tasks: Sequence[Task], witness: Path, jobs: int | None, threads: int) -> Iterator[tuple[int, int]]:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    most = max((int(node.get("CPU", 0)) for node in nodes), default=0)
    if most < threads:
        raise ConfigError(f"each run is to have {threads} CPUs and the largest node of the Ray cluster has {most}; give fewer threads")
    gpu = any(node.get("GPU", 0) >= 1 for node in nodes)
    start = ray.remote(num_cpus=threads, num_gpus=int(gpu), max_retries=0)(_remote())
    content = witness.read_text(encoding="utf-8")
    waiting = list(enumerate(tasks))[::-1]
    running: dict[Any, int] = {}
    try:
        while waiting or running:
            while waiting and (jobs is None or len(running) < jobs):
                index, task = waiting.pop()
                running[start.remote(task.arguments, str(task.log), str(witness), content, str(ROOT), threads)] = index
            done, _ = ray.wait(list(running), num_returns=1)
            for reference in done:
                index = running.pop(reference)
                yield index, _status(ray, reference)
    finally:
        for reference in running:
            ray.cancel(reference)
        with contextlib.suppress(ray.exceptions.RayError):  # a cancelled task ends with one
            ray.get(list(running), timeout=60)


def _status(ray: Any, reference: Any) -> int:
    try:
        return int(ray.get(reference))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, FileNotFoundError):
            raise ConfigError(str(error.cause)) from error
        raise
    except ray.exceptions.WorkerCrashedError:
        return 1  # of this task alone: the others go on


def _remote() -> Any:
    """What a worker does; a closure, so that it travels by value and the worker needs nothing but Python to start it."""

    def run(arguments: Sequence[str], log: str, witness: str, content: str, root: str, threads: int) -> int:
        import os
        import platform
        import subprocess
        import sys
        from pathlib import Path

        seen = Path(witness)
        if not seen.is_file() or seen.read_text(encoding="utf-8") != content:
            raise FileNotFoundError(
                f"node {platform.node()} does not see {witness} as the machine that started the sweep does; put the sweep's folder and "
                "its notebook on storage that all nodes share"
            )
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        if Path(root, "specbench").is_dir():  # a checkout on shared storage; else the package that this node has installed
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        with open(log, "wb") as stream:
            child = subprocess.Popen([sys.executable, *arguments], stdout=stream, stderr=subprocess.STDOUT, env=environment)
            try:
                return child.wait()
            finally:
                if child.poll() is None:
                    child.terminate()
                    child.wait(30)

    return run
