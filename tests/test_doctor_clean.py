"""False alarms are bugs: what the doctor may say about pairs that are right, family by family, and the bundled pairs."""

from __future__ import annotations

from pathlib import Path

import pytest
from dialects import EXAMPLES
from doctored import draft, quantized_draft, quantized_verifier
from stored import CASES
from tiny import tiny_draft, tiny_verifier

import specbench as sb
from specbench.bundled import VERIFIERS
from specbench.doctor.findings import Report
from specbench.doctor.pages import pages

GUESSED = "aux-layers-guessed"
# Example -> (codes above info, codes of info). Above info only where the example's own config leaves something open: no layer ids in a
# family whose trainers use others than the default, a layer count that is the verifier's.
EXPECTED: dict[str, tuple[set[str], set[str]]] = {
    "safeailab-bin": ({"layer-count"}, {"layers-invented", "architecture-unregistered", "embedding-borrowed", "rope-default", "aux-layers-default", "pickles"}),
    "safeailab": (set(), {"architecture-unregistered", "embedding-borrowed", "rope-default", "aux-layers-default"}),
    "safeailab-70b": (set(), {"architecture-unregistered", "embedding-own", "rope-default", "aux-layers-default"}),
    "safeailab-full-vocabulary": (set(), {"architecture-unregistered", "embedding-borrowed", "map-identity", "rope-default", "aux-layers-default"}),
    "specforge-nested-ids": (set(), {"embedding-borrowed", "rope-differs", "aux-layers-moved"}),
    "specforge-yarn": ({GUESSED}, {"embedding-borrowed", "rope-differs"}),
    "specforge-mrope": ({GUESSED}, {"embedding-borrowed"}),
    "speculators-old": ({GUESSED}, {"nested-config", "embedding-borrowed"}),
    "speculators-old-true": (set(), {"nested-config", "embedding-borrowed", "norm-before-residual-ignored"}),
    "speculators-new": (set(), {"nested-config", "embedding-own", "embedding-replaced", "norm-before-residual-ignored"}),
    "speculators-four-states": (set(), {"nested-config", "embedding-borrowed", "aux-layers-moved"}),
    "speculators-two-layers": (set(), {"layers-unbuilt", "nested-config", "tensors-dropped", "embedding-borrowed", "norm-before-residual-ignored"}),
    "speculators-qwen3-windows": (set(), {
        "layers-unbuilt", "qk-norms-unread", "nested-config", "tensors-dropped", "embedding-borrowed", "rope-differs", "norm-before-residual-ignored",
    }),
    "angelslim": (set(), {
        "architecture-unregistered", "embedding-own", "rope-differs", "aux-layers-default", "another-verifier", "tied-draft", "embedding-replaced",
    }),
    "modelopt": (set(), {"embedding-borrowed", "rope-differs", "aux-layers-moved"}),
    "modelopt-boundary-ids": (set(), {"embedding-borrowed", "rope-default", "aux-layers-moved"}),
    "modelopt-without-aux": (set(), {"embedding-borrowed", "rope-default"}),
    "nemo-eagle-3.1": (set(), {"architecture-unregistered", "embedding-own", "rope-default", "embedding-replaced"}),
    "biases": ({GUESSED}, {"embedding-borrowed", "rope-default"}),
    "borrowed-head": ({GUESSED}, {"embedding-borrowed", "head-borrowed", "map-identity", "rope-default"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_verifier(tmp_path_factory.mktemp("clean") / "verifier")


def split(report: Report) -> tuple[set[str], set[str]]:
    above = {finding.code for finding in report.at_least("warning")}
    return above, set(report.codes) - above


def complete(report: Report) -> None:
    """Every finding says everything: sentence, evidence with values, fix, a page."""
    for finding in report:
        assert finding.code in pages() and finding.sentence and finding.fix, finding
        assert finding.evidence and all(item.file and item.value for item in finding.evidence), finding
        assert finding.sees or finding.severity == "info"
        assert all(one.sees and one.why for one in finding.affected)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_a_pair_of_each_family(example, verifier: Path, tmp_path: Path) -> None:
    report = sb.diagnose(sb.open_pair(verifier, example.write(tmp_path / "draft")))
    assert split(report) == EXPECTED[example.name], str(report)
    complete(report)
    assert report.exit_code() == 0


def test_the_table_has_every_family() -> None:
    assert EXPECTED.keys() == {example.name for example in EXAMPLES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_plain_draft_beside_every_format(case, tmp_path: Path) -> None:
    """Its files are right; what old releases make of it is a remark."""
    report = sb.diagnose(quantized_verifier(tmp_path / "v", case), draft(tmp_path / "d", {"torch_dtype": "bfloat16"}))
    assert not report.at_least("warning"), str(report)
    matters = {"quantization-from-verifier", "silent-corruption"} & set(report.codes)
    assert len(matters) == 1, str(report)
    (affected,) = report[matters.pop()].affected
    assert affected.policy == "vllm-0.11.0"
    complete(report)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_quantized_draft_of_every_format(case, verifier: Path, tmp_path: Path) -> None:
    section = {**case.section, "ignore": ["lm_head", "fc"]} if "config_groups" in case.section else dict(case.section)
    if "config_groups" not in section:
        key = {"modelopt": "exclude_modules"}.get(section.get("quant_method", "modelopt"), "modules_to_not_convert")
        section |= {key: ["fc", "lm_head"], "modules_in_block_to_not_quantize": ["fc"], "ignored_layers": ["fc"]}
    if case.file != "config.json":
        section["quant_method"] = "modelopt"
    report = sb.diagnose(verifier, quantized_draft(tmp_path / "d", case, section))
    assert not report.at_least("warning"), str(report)
    assert {one.policy for one in report["quantization-ignored"].affected} >= {"vllm-0.10.2", "vllm-0.11.0"}


@pytest.mark.slow
@pytest.mark.parametrize("name", VERIFIERS)
def test_the_bundled_pairs(name: str) -> None:
    report = sb.diagnose(sb.bundled_pair(name), values=True)
    assert not report.at_least("warning"), str(report)
    complete(report)
    assert ("quantization-from-verifier" in report) == (name in ("w4a16", "w4a16-asym", "w8a16", "nvfp4a16"))
    assert ("silent-corruption" in report) == (name in ("w8a8", "fp8"))


def test_the_tiny_pair_of_other_tests(verifier: Path, tmp_path: Path) -> None:
    assert not sb.diagnose(verifier, tiny_draft(tmp_path / "d")).at_least("warning")
