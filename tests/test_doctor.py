"""The report itself: what it holds and shows, how it is restricted, that it reads no weight byte, and how fast it is."""

from __future__ import annotations

import ast
import builtins
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from doctored import draft, quantized_verifier
from tiny import tiny_draft, tiny_verifier, tiny_w4a16_verifier

import specbench as sb
from specbench.doctor import findings, pages
from specbench.doctor.engines import engine_policy
from specbench.doctor.findings import Finding, Report
from specbench.doctor.show import report_text
from specbench.doctor.subject import engine_name
from specbench.errors import ConfigError
from specbench.policies import POLICIES

DOCTOR = Path(findings.__file__).parent
SCHEMA = json.loads((DOCTOR / "schema.json").read_text())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("doctor")
    return sb.open_pair(tiny_w4a16_verifier(folder / "v"), draft(folder / "d"))


@pytest.fixture(scope="module")
def report(pair: Any) -> Report:
    return sb.diagnose(pair)


def test_the_seed_bug_says_everything(report: Report) -> None:
    found = report["quantization-from-verifier"]
    assert found.severity == "info" and report.exit_code("warning") == 0
    (one,) = found.affected
    assert (one.engine, one.policy, one.outcome) == ("vLLM 0.11.0", "vllm-0.11.0", "KeyError")
    assert one.sees == "KeyError: 'layers.0.mlp.down_proj.weight'" and "PR 25883" in one.why
    values = {str(item) for item in found.evidence}
    assert "draft config.json: quantization_config = absent" in values
    assert "verifier config.json: quantization_config = compressed-tensors pack-quantized W4" in values
    assert "draft model.safetensors: midlayer.mlp.down_proj.weight = F32 [64, 128]" in values
    assert "0.11.1" in found.fix


def test_one_engine_decides_severity(pair: Any) -> None:
    old, new = sb.diagnose(pair, engine="vllm==0.11.0"), sb.diagnose(pair, engine="vllm==0.11.1")
    assert old["quantization-from-verifier"].severity == "error" and old.exit_code() == 1 and old.engine == "vllm-0.11.0"
    assert {one.policy for found in old for one in found.affected} == {"vllm-0.11.0"}
    assert "quantization-from-verifier" not in new and new.exit_code() == 0


def test_what_an_engine_moves_silently_is_a_warning_once_it_is_named(tiny: Any, tmp_path: Path) -> None:
    moved = sb.open_pair(tiny["verifier"], draft(tmp_path / "d", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}))
    report = sb.diagnose(moved, engine="vllm==0.32.0")
    assert report["aux-layers-moved"].severity == "warning" and report.exit_code() == 0 and report.exit_code("warning") == 1
    assert sb.diagnose(moved)["aux-layers-moved"].severity == "info"


def test_whom_it_does_not_concern_is_part_of_the_fix(report: Report) -> None:
    fix = report["quantization-from-verifier"].fix
    assert "Not affected: vLLM 0.10.2, vLLM 0.11.1" in fix and "vLLM 0.11.0" not in fix.partition("Not affected")[2]


def test_what_is_not_known_of_a_release_is_said(pair: Any, tmp_path: Path) -> None:
    report = sb.diagnose(pair, engine="vllm==0.28.0")
    assert "embed_tokens" in report["engine-unestablished"].sentence and report["engine-unestablished"].severity == "info"
    assert "engine-unestablished" not in sb.diagnose(pair, engine="vllm==0.32.0")
    short = sb.open_pair(pair.verifier.path, draft(tmp_path / "d", {"max_position_embeddings": 16}))
    assert len(sb.diagnose(short)["positions-short"].affected) == 4
    assert not sb.diagnose(short, engine="vllm==0.32.0")["positions-short"].affected


@pytest.mark.parametrize("options", [{"speculative_config": {"nope": 1}}, {"load_config": {"load_format": "x"}}, {"draft_load_config": 3}])
def test_wrong_options_are_errors_and_no_findings(pair: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        sb.diagnose(pair.verifier.path, pair.draft.path, **options)


def test_the_draft_may_be_named_by_a_speculative_config(pair: Any, tmp_path: Path) -> None:
    named = sb.diagnose(pair.verifier.path, speculative_config={"model": str(pair.draft.path)})
    assert named.codes == sb.diagnose(pair).codes and named.draft["name"] == str(pair.draft.path)
    (tmp_path / "empty").mkdir()
    unread = sb.diagnose(pair.verifier.path, speculative_config={"model": str(tmp_path / "empty")})
    assert unread.codes == ("no-config",) and not unread.readable


def test_engines_by_name() -> None:
    for name, policy in POLICIES.items():
        if name != "draft":
            assert engine_policy(name) is policy and engine_policy(name.replace("vllm-", "vLLM==")) is policy
    assert engine_policy("vllm==0.11.0.post2").name == "vllm-0.11.0"
    assert engine_name(POLICIES["vllm-0.30.0-mrv2"]) == "vLLM 0.30.0 (Model Runner V2)"
    for wrong in ("vllm", "draft", "vllm==9.9.9"):
        with pytest.raises(ConfigError, match="known: vllm==0.10.2"):
            engine_policy(wrong)


def test_what_is_predicted_is_what_loading_does(pair: Any) -> None:
    """Policy by policy: a rehearsal and a real load end alike."""
    from specbench.checkpoint.families import recognise
    from specbench.doctor.engines import rehearse
    from specbench.doctor.subject import Subject
    from specbench.reproduce import attempt_load

    subject = Subject(pair, recognise(pair.draft.config, pair.draft.tensors, "draft"))
    for name, policy in POLICIES.items():
        predicted, real = rehearse(subject, policy), attempt_load(pair, policy)
        assert (predicted.outcome == "loads") == real.loaded, name
        if real.is_key_error:
            assert (predicted.outcome, predicted.key) == ("KeyError", real.key)


def test_atlas_formats_are_predicted(tmp_path: Path) -> None:
    """The formats and outcomes that were observed on vLLM 0.11.0 itself."""
    from dataclasses import replace

    from test_failure_atlas import OBSERVED

    from specbench.failure_atlas import VERIFIER_FORMATS

    plain = sb.open_pair(tiny_verifier(tmp_path / "v"), tiny_draft(tmp_path / "d"))
    told = {"KeyError": "KeyError", "silent corruption": "silent", "shape error": "shape error", "refused": "refused"}
    for name, section in VERIFIER_FORMATS.items():
        verifier = replace(plain.verifier, quantization=section, quantization_source="config.json: quantization_config")
        declared = replace(plain, verifier=verifier)
        report = sb.diagnose(declared, engine="vllm==0.11.0")
        outcome, key = OBSERVED[name]
        found = [one for code in ("quantization-from-verifier", "silent-corruption") if code in report for one in report[code].affected]
        assert [one.outcome for one in found] == ([told[outcome]] if outcome in told else []), name
        assert all(repr(key) in one.sees for one in found if key)


def test_json_follows_its_schema(report: Report, tmp_path: Path) -> None:
    unreadable = sb.diagnose(tmp_path, tmp_path / "none")
    for one in (report, unreadable):
        content = json.loads(json.dumps(one.to_dict()))
        jsonschema.validate(content, SCHEMA)
    assert not unreadable.readable and unreadable.exit_code("error") == 2


def test_text_fits_its_width_and_says_it_all(report: Report) -> None:
    for width in (60, 100, 140):
        text = report_text(report, width)
        lines = [line.replace(str(report.verifier["name"]), "").replace(str(report.draft["name"]), "") for line in text.splitlines()]
        assert max(map(len, lines)) <= width or width == 60, "but for paths, which are not broken"
        for finding in report:
            assert finding.code in text
    assert "KeyError: 'layers.0.mlp.down_proj.weight'" in str(report)
    assert "\x1b" not in str(report)
    assert "fails in vLLM 0.11.0; --engine asks about one" in str(report) and "fails in" in report._repr_html_()


def test_html_is_escaped(pair: Any) -> None:
    evil = Finding("refused", "error", "<script>alert(1)</script>", findings.evidence_of({"a: <b>": "<i>"}), (), "", "<u>")
    page = Report(
        {"name": "<v>", "revision": None, "quantization": None}, {"name": "d", "revision": None, "quantization": None}, (evil,)
    )._repr_html_()
    assert not re.search(r"<(script|i|u|v)>", page) and "&lt;script&gt;" in page


def test_frame_and_lookups(report: Report) -> None:
    assert list(report.to_frame().columns) == ["severity", "code", "finding", "affected", "fix"] and len(report.to_frame()) == len(report)
    assert report.codes[0] == report.findings[0].code and report.worst == "info"
    with pytest.raises(KeyError):
        report["no-such-code"]
    with pytest.raises(ConfigError, match="'fatal'"):
        report.exit_code("fatal")


def codes_in(source: str) -> set[str]:
    """What is given as a code: to `finding`, to `fail`, or as `code=`."""
    found: set[str] = set()
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        places = {"finding": call.args[:1], "fail": call.args[1:2]}.get(name, [])
        places += [keyword.value for keyword in call.keywords if keyword.arg == "code"]
        found |= {
            node.value for place in places for node in ast.walk(place) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
    return found - {""}


def test_every_code_in_the_sources_has_a_page_and_every_page_a_source() -> None:
    known = pages.pages()
    sources = [path.read_text() for path in DOCTOR.parent.rglob("*.py")]
    assert not [code for code in known if not any(f'"{code}"' in source for source in sources)]
    used = {code for source in sources for code in codes_in(source)}
    assert len(used) > 60 and not used - known.keys()
    for page in known.values():
        assert page.severity in findings.SEVERITIES and page.title and page.fix and page.cause
        assert page.sees or page.severity == "info"
        assert page.code in str(page) and page.cause.split()[0] in str(page)
    with pytest.raises(ConfigError, match="nearest: fc-width"):
        pages.explain("fc-widht")


def test_no_weight_byte_is_read(pair: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever is opened during a diagnosis, only headers of weight files are read."""
    read: list[int] = []
    opened = Path.open

    def spy(path: Path, *args: Any, **kwargs: Any) -> Any:
        file = opened(path, *args, **kwargs)
        if path.suffix == ".safetensors":
            original = file.read
            file_read = lambda size=-1: read.append(size) or original(size)  # noqa: E731
            methods = {"__enter__": lambda s: s, "__exit__": lambda s, *a: file.close(), "fileno": lambda s: file.fileno()}
            return type("Spy", (), {**methods, "read": staticmethod(file_read)})()
        return file

    monkeypatch.setattr(Path, "open", spy)
    monkeypatch.setattr("os.preadv", lambda *a: pytest.fail("weight bytes were read"))
    monkeypatch.setattr(builtins, "open", lambda *a, **k: pytest.fail(f"open{a}"))
    fresh = sb.open_pair(pair.verifier.path, pair.draft.path)
    headers = sum(read)
    assert sb.diagnose(fresh) and sum(read) >= headers
    sizes = [8 + int.from_bytes(opened(side.path / "model.safetensors", "rb").read(8), "little") for side in (fresh.verifier, fresh.draft)]
    assert max(read) <= max(sizes)


def full_size(folder: Path, shards: int) -> tuple[Path, Path]:
    """Sparse files with the headers of an 8B W4A16 verifier, in `shards` files, and of its draft."""
    from large import write_draft, write_verifier

    return write_verifier(folder / "v", shards), write_draft(folder / "d")


@pytest.mark.parametrize("shards", [5, 130])
def test_a_pair_of_full_size_takes_less_than_half_a_second(tmp_path: Path, shards: int) -> None:
    verifier, path = full_size(tmp_path, shards)
    sb.diagnose(verifier, path)  # imports
    spent = []
    for _ in range(3):
        began = time.process_time()
        report = sb.diagnose(verifier, path)
        spent.append(time.process_time() - began)
    assert not report.at_least("warning"), str(report)
    assert "quantization-from-verifier" in report
    print(f"a pair of 8B shape: {min(spent):.3f} s of CPU time")  # shown by -s; time is no matter of pass or fail


def test_importing_specbench_imports_nothing_heavy() -> None:
    script = "import sys; import specbench; print([m for m in ('torch', 'transformers', 'pandas', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=DOCTOR.parents[1])
    assert done.stdout.strip() == "[]"


def test_overrides_settle_what_files_leave_open(tmp_path: Path) -> None:
    verifier = tiny_verifier(tmp_path / "v")
    open_ids = sb.open_pair(verifier, draft(tmp_path / "d", {"eagle_config": None}))
    assert "aux-layers-guessed" in sb.diagnose(open_ids)
    assert "aux-layers-guessed" not in sb.diagnose(open_ids, overrides={"aux_layers": (2, 4, 5)})


def test_a_pair_and_a_draft_are_too_much(pair: Any) -> None:
    with pytest.raises(ConfigError, match="a pair and a draft"):
        sb.diagnose(pair, "draft")


def test_threads_of_torch_are_left_alone(pair: Any) -> None:
    before = torch.get_num_threads()
    sb.diagnose(pair)
    assert torch.get_num_threads() == before


def test_a_quantized_verifier_beside_a_bf16_draft_is_named_by_format(tmp_path: Path) -> None:
    report = sb.diagnose(quantized_verifier(tmp_path / "v", "FP8 channel"), draft(tmp_path / "d"))
    found = report["silent-corruption"]
    assert found.affected[0].outcome == "silent" and "acceptance near zero" in found.affected[0].sees
