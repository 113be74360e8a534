"""The shipped notebooks: thin, without outputs, one parameters cell of literals; and each runs to its end on a tiny pair."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.image import imread
from tiny import tiny_draft, tiny_verifier, tiny_w4a16_verifier
from tiny_tokenizer import write_tokenizer

from specbench.bench.notebooks import NotebookError, NotebookRun, read_parameters, run_notebook
from specbench.bench.records import load_runs

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EACH = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
MAX_CODE_CELLS, MAX_SOURCE_LINES, MAX_FUNCTION_LINES = 25, 120, 5


def document(notebook: Path) -> dict[str, Any]:
    return json.loads(notebook.read_text(encoding="utf-8"))


def code(notebook: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in document(notebook)["cells"] if cell["cell_type"] == "code"]


def test_names_are_numbered_and_each_number_stands_once() -> None:
    numbers = [re.fullmatch(r"(\d\d)_[a-z0-9_]+", notebook.stem) for notebook in NOTEBOOKS]
    assert len(NOTEBOOKS) >= 4 and all(numbers)
    assert len({match[1] for match in numbers if match}) == len(NOTEBOOKS)
    assert [path.suffix for path in (ROOT / "notebooks").iterdir() if path.is_file()] == [".ipynb"] * len(NOTEBOOKS)


@EACH
def test_no_outputs_and_no_execution_counts(notebook: Path) -> None:
    for cell in document(notebook)["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
        assert not set(cell["metadata"]) - {"tags"}, "left by a tool"


@EACH
def test_kernel_is_no_one_machines(notebook: Path) -> None:
    metadata = document(notebook)["metadata"]
    assert metadata["kernelspec"]["name"] == "python3"
    assert set(metadata) <= {"kernelspec", "language_info"} and metadata.get("language_info", {}).get("name", "python") == "python"


@EACH
def test_second_cell_is_the_one_parameters_cell_and_holds_annotated_literals(notebook: Path) -> None:
    cells = document(notebook)["cells"]
    tagged = [i for i, cell in enumerate(cells) if "parameters" in cell["metadata"].get("tags", [])]
    assert tagged == [1]
    source = "".join(cells[1]["source"])
    for statement, line in zip(ast.parse(source).body, source.splitlines(), strict=True):
        assert isinstance(statement, ast.AnnAssign) and statement.value is not None, "name: type = literal"
        ast.literal_eval(statement.value)
        assert re.search(r"  # \S", line), f"no comment: {line}"
    assert read_parameters(notebook)["run_dir"] == ""


@EACH
def test_first_cell_says_claim_inputs_outputs_and_time(notebook: Path) -> None:
    cell = document(notebook)["cells"][0]
    text = "".join(cell["source"])
    assert cell["cell_type"] == "markdown" and text.startswith(f"# {notebook.stem[:2]} ")
    assert all(part in text for part in ("**In**", "**Out**", "**Time**", "result.json"))


@EACH
def test_no_logic_in_cells(notebook: Path) -> None:
    sources = code(notebook)
    tree = ast.parse("\n".join(sources))
    for node in ast.walk(tree):
        assert not isinstance(node, ast.ClassDef | ast.Try | ast.While)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES, f"{node.name} belongs into the library"
    lines = [line for source in sources for line in source.splitlines() if line.strip()]
    assert len(sources) <= MAX_CODE_CELLS and len(lines) <= MAX_SOURCE_LINES
    assert "finish(run" in sources[-1], "the last cell leaves the marker"


@EACH
def test_no_path_of_a_machine_and_no_shell(notebook: Path) -> None:
    text = notebook.read_text(encoding="utf-8")
    assert not re.search(r"(/home/|/root/|/Users/|/tmp/|[A-Z]:\\\\)", text)
    assert not [line for source in code(notebook) for line in source.splitlines() if re.match(r"\s*[!%]", line)]


# --- executed on a tiny pair; what counts is what they leave on disk


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Parameters that all notebooks share: a tiny quantized verifier, its plain twin, a draft, two prompts in two categories."""
    folder = tmp_path_factory.mktemp("inputs")
    prompts = folder / "prompts.jsonl"
    rows = [{"question_id": i, "category": name, "turns": [f"Say {name}."]} for i, name in enumerate(["math", "stem"], 1)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {
        "verifier": str(write_tokenizer(tiny_w4a16_verifier(folder / "w4a16"))),
        "reference": str(write_tokenizer(tiny_verifier(folder / "plain"))),
        "draft": str(tiny_draft(folder / "draft")),
        "prompts": str(prompts),
        "device": "cpu",
        "max_new_tokens": 12,
    }


def execute(name: str, folder: Path, inputs: dict[str, Any], **values: Any) -> NotebookRun:
    notebook = ROOT / "notebooks" / f"{name}.ipynb"
    known = read_parameters(notebook)
    return run_notebook(notebook, folder, {key: value for key, value in {**inputs, **values}.items() if key in known}, progress=False)


def shown(run: NotebookRun) -> int:
    """How many figures the executed notebook shows."""
    cells = json.loads(run.output.read_bytes())["cells"]
    return sum("image/png" in output.get("data", {}) for cell in cells for output in cell.get("outputs", []))


def figures(folder: Path) -> set[str]:
    """Names of figures that exist as a PNG with something on it and as an SVG."""
    found = set()
    for path in (folder / "figures").glob("*.png"):
        assert imread(path).std() > 0.02, f"{path} is blank"
        assert (path.with_suffix(".svg")).read_text(encoding="utf-8").rstrip().endswith("</svg>")
        found.add(path.stem)
    return found


@pytest.mark.notebook
def test_01_reproduces_the_key_error(tmp_path: Path, inputs: dict[str, Any]) -> None:
    run = execute("01_reproduce_keyerror", tmp_path, inputs)
    assert run.facts == {"key": "layers.0.mlp.down_proj.weight", "key_error": True, "loads_under_draft": True}
    table = pd.read_csv(tmp_path / "outcomes.csv")
    failed = table[~table.loaded]
    assert len(table) == 4 and list(failed.policy) == ["vllm-0.11.0"]
    assert failed.verifier_quantization.str.startswith("compressed-tensors pack-quantized").all()
    assert figures(tmp_path) == {"outcomes"}
    assert "layers.0.mlp.down_proj.weight_packed" in run.report.read_text(encoding="utf-8")


@pytest.mark.notebook
def test_02_proves_that_outputs_are_the_verifiers_own(tmp_path: Path, inputs: dict[str, Any]) -> None:
    run = execute("02_apply_the_fix", tmp_path, inputs, dtypes=["float32"])
    report = json.loads((tmp_path / "doctor.json").read_text(encoding="utf-8"))
    assert report["readable"] and "quantization-from-verifier" in {finding["code"] for finding in report["findings"]}
    table = pd.read_csv(tmp_path / "lossless.csv")
    assert list(table.category) == ["math", "stem"] and table.lossless.all() and table.identical.all(), "fp32: no rounding to excuse"
    assert run.facts["identical_float32"] == "2 of 2"
    assert run.facts["mean_acceptance_length"] >= 1
    assert "white-space:pre-wrap" in (tmp_path / "accepted_text.html").read_text(encoding="utf-8")


@pytest.mark.notebook
def test_03_shows_whose_load_config_counts(tmp_path: Path, inputs: dict[str, Any]) -> None:
    run = execute("03_draft_load_config", tmp_path, inputs, verifier=inputs["reference"])
    table = pd.read_csv(tmp_path / "cases.csv").set_index(["case", "policy"])
    assert run.facts["wrong"] == {"vllm-0.30.0-mrv2": 3, "vllm-0.31.0": 0, "draft": 0}
    ignored = table.outcome.xs("vllm-0.30.0-mrv2", level="policy")
    assert dict(ignored) == {".bin draft": "CheckpointFileError", "own download_dir": "other weights", "dummy verifier": "other weights"}
    assert set(table.outcome.xs("draft", level="policy")) == {"the draft"}
    assert figures(tmp_path) == {"load_cases"}


@pytest.mark.notebook
def test_04_measures_acceptance_of_both_verifiers(tmp_path: Path, inputs: dict[str, Any]) -> None:
    run = execute("04_acceptance", tmp_path, inputs, num_speculative_tokens=[1, 3], formats=[])
    rows = load_runs(tmp_path)
    assert len(rows) == 2 * 2 * 2 and set(rows.status) == {"ok"} and set(rows.verifier_format) == {"fp32", "w4a16"}
    summary = pd.read_csv(tmp_path / "summary.csv")
    assert summary.mean_acceptance_length.between(1, 4).all()
    assert set(run.facts) == {f"mean_acceptance_length_{name}_k{k}" for name in ("fp32", "w4a16") for k in (1, 3)}
    assert set(pd.read_csv(tmp_path / "by_category.csv").category) == {"math", "stem"}
    assert set(pd.read_csv(tmp_path / "per_position.csv").position) == {1, 2, 3}
    shorter = pd.read_csv(tmp_path / "read_off.csv")
    assert len(shorter) == 2 * 3 and shorter.read_off.between(1, 4).all() and shorter[shorter.k != 2].measured.notna().all()
    assert "data:image/svg+xml" in (tmp_path / "summary.html").read_text(encoding="utf-8")
    assert figures(tmp_path) == {"acceptance", "acceptance_by_category", "per_position"} and shown(run) == 3


@pytest.mark.notebook
def test_06_draws_what_each_load_did(tmp_path: Path, inputs: dict[str, Any]) -> None:
    chosen = {"verifier": inputs["reference"], "formats": ["plain", "AWQ", "fp8 dynamic"], "policies": ["draft", "vllm-0.11.0"]}
    execute("06_failure_atlas", tmp_path, inputs, **chosen)
    table = pd.read_csv(tmp_path / "atlas.csv")
    found = table[table.draft_format == "plain"].set_index(["verifier_format", "policy"]).outcome
    assert found["AWQ", "vllm-0.11.0"] == "KeyError" and found["fp8 dynamic", "vllm-0.11.0"] == "silent corruption"
    assert set(found.xs("draft", level="policy")) == {"loads right"}
    assert len(table) == 3 * 2 * 2 and table.mean_acceptance_length.notna().any()
    assert figures(tmp_path) == {"failure_atlas"}


@pytest.mark.notebook
def test_05_measures_speed_against_its_own_baseline(tmp_path: Path, inputs: dict[str, Any]) -> None:
    chosen = {"num_speculative_tokens": [0, 2], "repeats": 1, "formats": [], "prompt_lookup": 3}
    run = execute("05_throughput", tmp_path, inputs, **chosen)
    table = pd.read_csv(tmp_path / "summary.csv")
    other = table[table.engine == "transformers"].set_index("decoding")
    assert set(other.index) == {"generate", "prompt lookup"} and set(other.verifier_format) == {"fp32"}, "labelled, on the reference"
    assert (other.decode_tokens_per_second > 0).all() and other.k["prompt lookup"] == 3 and round(other.speedup["generate"], 9) == 1
    summary = table[table.engine == "specbench"].set_index(["verifier_format", "k"])
    assert set(summary.index) == {("fp32", 0), ("fp32", 2), ("w4a16", 0), ("w4a16", 2)}
    assert (summary.decode_tokens_per_second > 0).all() and summary.speedup.xs(0, level="k").round(9).eq(1).all()
    assert (summary[["ttft_s", "inter_token_latency_s", "peak_memory_bytes"]] > 0).all(axis=None)
    shares = summary[["draft_share", "verify_share", "other_share"]]
    assert shares.sum(axis=1).round(6).eq(1).all() and (shares.draft_share.xs(2, level="k") > 0).all()
    costs = pd.read_csv(tmp_path / "cost_model.csv")
    assert list(costs.k) == [2, 2] and costs.verdict.str.match("faster|slower|no faster").all() and costs.predicted_speedup.gt(0).all()
    assert set(pd.read_csv(tmp_path / "steps.csv").role) == {"verifier", "draft"}
    assert set(run.facts) == {"speedup_fp32_k2", "speedup_w4a16_k2", "speedup_prompt_lookup_fp32_k3"}
    assert "prompt lookup" in (tmp_path / "summary.html").read_text(encoding="utf-8")
    assert figures(tmp_path) == {"throughput", "speedup", "time_share"} and shown(run) == 3


@pytest.mark.notebook
def test_a_notebook_stops_without_marker_where_its_input_is_bad(tmp_path: Path, inputs: dict[str, Any]) -> None:
    with pytest.raises(NotebookError, match=r"04_acceptance.ipynb failed at cell 3 of .*neither a file nor a shipped set"):
        execute("04_acceptance", tmp_path / "run", inputs, prompts="no-such-set")
    assert json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))["complete"] is False
