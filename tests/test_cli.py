"""`specbench` in a shell: every command gives what the library gives, ends with the right code, and fails on one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from doctored import draft
from test_sweep import FINISH, PARAMETERS, WORK, write
from tiny import tiny_draft, tiny_verifier, tiny_w4a16_verifier
from tiny_tokenizer import write_tokenizer
from typer.testing import CliRunner

import specbench as sb
from specbench.bundled import VERIFIERS
from specbench.cli import app
from specbench.command import command
from specbench.doctor import findings
from specbench.doctor.pages import pages

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ("doctor", "plan", "reproduce", "generate", "bench", "sweep", "bundled", "command")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("cli")
    verifier = write_tokenizer(tiny_verifier(folder / "v"))
    return str(verifier), str(tiny_draft(folder / "d"))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("cli-packed")
    return str(tiny_w4a16_verifier(folder / "v")), str(tiny_draft(folder / "d"))


def run(*words: str, code: int = 0, stdin: str | None = None) -> Any:
    result = CliRunner().invoke(app, words, input=stdin, prog_name="specbench")
    assert result.exit_code == code, f"{result.output}\n{result.stderr}\n{result.exception!r}"
    return result


def refused(*words: str, said: Sequence[str]) -> None:
    result = run(*words, code=2)
    assert not result.stdout and result.stderr.count("\n") == 1 and result.stderr.startswith("specbench: "), result.stderr
    assert all(word in result.stderr for word in said), result.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples(name: str) -> None:
    text = run(name, "--help").stdout
    assert "Examples:" in text and f"specbench {name}" in text


def test_help_lists_every_command() -> None:
    text = run("--help").stdout
    assert all(name in text for name in COMMANDS) and "--install-completion" in text
    assert run("--version").stdout.strip() == sb.__version__


def test_doctor_text_and_exit_codes(packed: tuple[str, str], tmp_path: Path) -> None:
    text = run("doctor", *packed).stdout
    assert "quantization-from-verifier" in text and "KeyError: 'layers.0.mlp.down_proj.weight'" in text
    assert "error" in run("doctor", *packed, "--engine", "vllm==0.11.0", code=1).stdout
    run("doctor", *packed, "--fail-on", "info", code=1)
    run("doctor", packed[0], str(tmp_path / "nothing"), code=2)
    assert "evidence" not in run("doctor", *packed, "--short").stdout


def test_doctor_json_follows_the_schema_and_the_library(packed: tuple[str, str]) -> None:
    content = json.loads(run("doctor", *packed, "--json").stdout)
    jsonschema.validate(content, json.loads(Path(findings.__file__).with_name("schema.json").read_text()))
    assert content == json.loads(json.dumps(sb.diagnose(*packed).to_dict()))


def test_doctor_options_reach_the_library(packed: tuple[str, str], tmp_path: Path) -> None:
    guessed = str(draft(tmp_path / "d", {"eagle_config": None}))
    run("doctor", packed[0], guessed, "--fail-on", "warning", code=1)
    run("doctor", packed[0], guessed, "--fail-on", "warning", "--override", "aux_layers=[2, 4, 5]")
    text = run("doctor", *packed, "--load-config", '{"load_format": "dummy"}').stdout
    assert "random-weights" in text
    assert "quantization-request" in run("doctor", *packed, "--speculative-config", '{"quantization": "awq"}', code=1).stdout
    assert "map-identity" not in run("doctor", *packed, "--values").stdout


@pytest.mark.parametrize("code", ["quantization-from-verifier", "aux-layers-ambiguous"])
def test_explain(code: str) -> None:
    text = " ".join(run("doctor", "--explain", code).stdout.split())
    page = pages()[code]
    assert page.cause in text and all(reference in text for reference in page.references)
    assert json.loads(run("doctor", "--explain", code, "--json").stdout)["cause"] == page.cause


def test_plan_and_diff(packed: tuple[str, str]) -> None:
    assert "embed_tokens" in run("plan", *packed).stdout
    rows = json.loads(run("plan", *packed, "--json").stdout)
    assert [row["setting"] for row in rows] == list(sb.resolve(sb.open_pair(*packed)).to_frame().setting)
    differing = json.loads(run("plan", *packed, "--diff", "draft", "vllm-0.11.0", "--json").stdout)
    assert "quantization" in {row["setting"] for row in differing}
    assert "no setting differs" in run("plan", *packed, "--diff", "draft", "draft").stdout
    assert "1e+06" in run("plan", *packed, "--override", "rope_theta=1e6").stdout


def test_reproduce(packed: tuple[str, str], pair: tuple[str, str]) -> None:
    assert "layers.0.mlp.down_proj.weight" in run("reproduce", *packed).stdout
    outcome = json.loads(run("reproduce", *packed, "--json").stdout)
    assert outcome["is_key_error"] and outcome["key"] == "layers.0.mlp.down_proj.weight"
    assert "loads under vllm-0.11.0" in run("reproduce", *pair).stdout


def test_command(packed: tuple[str, str]) -> None:
    opened = sb.open_pair(*packed)
    assert run("command", *packed).stdout.rstrip("\n") == command(opened)
    assert run("command", *packed, "--engine", "sglang", "-k", "5").stdout.rstrip("\n") == command(opened, "sglang", 5)


def test_bundled_lists_what_there_is() -> None:
    lines = run("bundled").stdout.splitlines()
    assert [line.split()[0] for line in lines] == [f"bundled:{name}" for name in VERIFIERS]
    refused("bundled", "w3a16", said=["'w3a16'", "bf16"])


def test_generate_equals_the_library(pair: tuple[str, str]) -> None:
    words = ("generate", *pair, "--prompt", "why", "-p", "how", "-k", "2", "--max-new-tokens", "8", "--device", "cpu")
    content = json.loads(run(*words, "--json").stdout)
    opened = sb.open_pair(*pair)
    target = sb.load_verifier(opened, device="cpu")
    out = sb.generate(target, sb.load_draft(opened, verifier=target), ["why", "how"], num_speculative_tokens=2, max_new_tokens=8)
    assert [answer["token_ids"] for answer in content["answers"]] == out.token_ids
    assert content["mean_acceptance_length"] == out.mean_acceptance_length
    result = run(*words)
    assert result.stdout == "".join(f"{text}\n" for text in out.text) and "mean acceptance length" in result.stderr


def test_generate_reads_standard_input_and_samples(pair: tuple[str, str]) -> None:
    words = (
        "generate",
        *pair,
        "--max-new-tokens",
        "6",
        "--temperature",
        "1.0",
        "--top-p",
        "0.9",
        "--seed",
        "7",
        "--batch-size",
        "2",
        "--json",
    )
    first, again = (json.loads(run(*words, stdin="one\n\ntwo\n").stdout)["answers"] for _ in range(2))
    assert first == again and [answer["prompt"] for answer in first] == ["one", "two"]
    tree = json.loads(run("generate", *pair, "-p", "why", "--max-new-tokens", "6", "--tree", "2", "2", "4", "--json").stdout)
    plain = json.loads(run("generate", *pair, "-p", "why", "--max-new-tokens", "6", "-k", "0", "--json").stdout)
    assert tree["answers"][0]["token_ids"] == plain["answers"][0]["token_ids"] and plain["mean_acceptance_length"] is None
    refused("generate", *pair, said=["no prompt"])


def test_bench_writes_rows_and_a_table(pair: tuple[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("bench", *pair, "-k", "0", "-k", "2", "--prompts-per-category", "1", "--max-new-tokens", "4", "--run-dir", str(folder))
    result = run(*words)
    assert "mean_acceptance_length" in result.stdout and str(folder) in result.stderr
    rows = sb.load_runs(folder)
    assert set(rows.k) == {0, 2} and set(rows.status) == {"ok"}
    refused(*words, said=["DataError"])  # the folder holds a run


@pytest.mark.notebook
def test_sweep_runs_a_file(tmp_path: Path) -> None:
    write(tmp_path / "inner.ipynb", PARAMETERS, WORK, FINISH)
    (tmp_path / "sweep.yaml").write_text("notebook: inner.ipynb\nrun_dir: out\ngrid: {k: [1, 2]}\n")
    rows = json.loads(run("sweep", str(tmp_path / "sweep.yaml"), "--jobs", "1", "--json", code=1).stdout)
    assert [row["status"] for row in rows] == ["complete", "failed"]  # the notebook fails at k = 2
    refused("sweep", str(tmp_path / "none.yaml"), said=["none.yaml"])


def test_errors_are_one_line_and_whole_with_debug(packed: tuple[str, str]) -> None:
    refused("plan", packed[0], packed[0], said=["ConfigError", "EAGLE-3 draft"])
    refused("doctor", *packed, "--engine", "vllm==9", said=["vllm==9", "known"])
    refused("doctor", *packed, "--fail-on", "fatal", said=["'fatal'", "warning"])
    refused("plan", *packed, "--override", "rope_theta", said=["NAME=VALUE"])
    refused("plan", *packed, "--load-config", "{", said=["--load-config", "JSON"])
    refused("doctor", "--explain", "nope", said=["'nope'"])
    refused("doctor", said=["no verifier"])
    refused("doctor", "--nope", said=["--nope", "specbench doctor --help"])
    refused("nope", said=["nope", "specbench --help"])
    refused("reproduce", *packed, "--policy", "vllm-9", said=["vllm-9"])
    for words in (("--debug", "plan", packed[0], packed[0]), ("plan", packed[0], packed[0], "--debug")):
        result = CliRunner().invoke(app, words)
        assert type(result.exception).__name__ == "ConfigError"


def test_a_hub_id_that_is_none_is_a_clear_finding(packed: tuple[str, str], tmp_path: Path) -> None:
    result = run("doctor", packed[0], str(tmp_path / "no" / "such" / "folder"), code=2)
    assert "unreachable" in result.stdout and "neither a folder here nor a hub id" in " ".join(result.stdout.split())


def test_shell_completion() -> None:
    environment = {**os.environ, "_SPECBENCH_COMPLETE": "complete_bash", "COMP_WORDS": "specbench do", "COMP_CWORD": "1"}
    script = "import sys; sys.argv = ['specbench']; from specbench.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.split() == ["doctor"]


def test_help_imports_no_torch() -> None:
    start = "import sys; sys.argv = ['specbench', 'doctor', '--explain', 'fc-width']\ntry:\n import specbench.cli as c; c.main()\n"
    script = start + "finally:\n print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.split()[-1] == "False"
