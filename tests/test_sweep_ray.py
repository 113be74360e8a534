"""The same sweep on a Ray cluster of two workers on this machine; skipped where Ray is not installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from test_sweep import FINISH, PARAMETERS, WORK, write

from specbench.bench.sweep import sweep
from specbench.bench.sweep_local import Task
from specbench.bench.sweep_ray import run_on_ray
from specbench.errors import ConfigError

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (pip install 'specbench[ray]')")


@pytest.fixture(scope="module")
def cluster():
    """Address of a cluster of two nodes with a CPU each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    yield made.address
    made.shutdown()


def test_without_ray_the_next_step_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbench.bench.sweep_ray.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'specbench\[ray\]'"):
        list(run_on_ray([], "auto", tmp_path / "w"))


@needs_ray
def test_two_workers_share_the_tasks(cluster: str, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    witness.write_text("seen")
    tell = "import os, time; print(os.getppid(), os.environ['OMP_NUM_THREADS'], time.time()); time.sleep(2); print(time.time()); exit({})"
    tasks = [Task(("-c", tell.format(status)), tmp_path / f"{status}.log") for status in (0, 5, 0, 7)]
    tasks = [Task(task.arguments, tmp_path / f"{i}.log") for i, task in enumerate(tasks)]
    assert dict(run_on_ray(tasks, cluster, witness)) == {0: 0, 1: 5, 2: 0, 3: 7}
    told = [task.log.read_text().split() for task in tasks]
    assert len({words[0] for words in told}) >= 2 and {words[1] for words in told} == {"1"}
    spans = sorted((float(words[2]), float(words[3])) for words in told)
    assert spans[1][0] < spans[0][1], "two at a time"
    assert spans[2][0] >= min(spans[0][1], spans[1][1]), "never three"


@needs_ray
def test_what_a_cluster_cannot_do_is_said_before_it_waits(cluster: str, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    witness.write_text("seen")
    task = Task(("-c", "print('never')"), tmp_path / "0.log")
    with pytest.raises(ConfigError, match="8 CPUs and the largest node of the Ray cluster has 1"):
        list(run_on_ray([task], cluster, witness, threads=8))
    ends = run_on_ray([task], cluster, witness)
    original = Path.read_text
    with pytest.MonkeyPatch.context() as patch:  # the driver sees another content than the workers do
        patch.setattr(Path, "read_text", lambda self, **kw: original(self, **kw) + "!" if self == witness else original(self, **kw))
        with pytest.raises(ConfigError, match="does not see .*storage that all nodes share"):
            list(ends)
    assert not task.log.exists()


@needs_ray
@pytest.mark.notebook
def test_the_same_sweep_on_ray(cluster: str, tmp_path: Path) -> None:
    notebook = write(tmp_path / "inner.ipynb", PARAMETERS, WORK, FINISH)
    sets = [{"k": k} for k in (1, 2, 4)]
    table = sweep(notebook, tmp_path / "runs", sets, ray=cluster, progress=False)
    assert list(table.status) == ["complete", "failed", "complete"] and list(table.exit_status) == [0, 1, 0]
    here = sweep(notebook, tmp_path / "runs", sets[:1], progress=False)
    assert here.status[0] == "complete" and here.run_id[0] == table.run_id[0], "a run is the same run on either"
