"""Load attempts: an engine's failure as data, success beside a plain verifier and under the draft's own policy."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from tiny import tiny_pair

from specbench.display import outcomes
from specbench.pair import Pair, open_pair
from specbench.reproduce import attempt_load, outcome_table

matplotlib.use("Agg")


def pair(folder: Path, quantized: bool) -> Pair:
    return open_pair(*tiny_pair(folder / ("w4a16" if quantized else "plain"), quantized=quantized))


def test_quantized_verifier_under_the_old_engine_is_a_key_error(tmp_path: Path) -> None:
    failure = attempt_load(pair(tmp_path, quantized=True), "vllm-0.11.0")
    assert not failure.loaded and failure.is_key_error and failure.error == "CheckpointKeyError"
    assert failure.key == failure.tensor == "layers.0.mlp.down_proj.weight"
    assert {name.rpartition(".")[2] for name in failure.module_parameters} == {"weight_packed", "weight_scale", "weight_shape"}
    assert failure.frames[-1].startswith("fill.py:")
    facts = failure.to_frame().set_index("fact").value
    assert facts["its args[0]"] == failure.key and facts["error"] == "CheckpointKeyError, a KeyError"


def test_the_other_three_load(tmp_path: Path) -> None:
    attempts = [attempt_load(pair(tmp_path, quantized), policy) for quantized in (False, True) for policy in ("vllm-0.11.0", "draft")]
    table = outcome_table(attempts)
    assert list(table.loaded) == [True, True, False, True]
    assert list(table.stopped_by) == ["", "", "KeyError: layers.0.mlp.down_proj.weight", ""]
    assert attempts[0].to_frame().empty


def test_outcomes_are_drawn_in_words(tmp_path: Path) -> None:
    attempts = [attempt_load(pair(tmp_path, quantized), policy) for quantized in (False, True) for policy in ("vllm-0.11.0", "draft")]
    ax = outcomes(attempts)
    texts = [text.get_text() for text in ax.texts]
    assert texts == ["loads", "loads", "KeyError\nlayers.0.mlp.down_proj.weight", "loads"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["policy vllm-0.11.0", "policy draft"]
