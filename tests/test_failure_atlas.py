"""The failure atlas on a tiny pair, held row by row against what vLLM 0.11.0 itself was observed to do."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from dialects import Shape, canonical_tensors, speculators
from tiny import pack_w4a16, tiny_draft, tiny_verifier, w4a16_section, write

import specbench as sb
from specbench.errors import ConfigError
from specbench.failure_atlas import OUTCOMES, VERIFIER_FORMATS, atlas

DOWN = "layers.0.mlp.down_proj.weight"
# Observed on vLLM 0.11.0 (CPU wheel, November 2026): an unquantized draft beside each verifier format, through its own get_model.
OBSERVED = {
    "plain": ("loads right", ""),
    "AWQ": ("KeyError", DOWN),
    "GPTQ": ("KeyError", DOWN),
    "W4A16": ("KeyError", DOWN),
    "W4A16 asym": ("KeyError", DOWN),
    "W8A16": ("KeyError", DOWN),
    "NVFP4": ("KeyError", DOWN),
    "W8A8 dynamic": ("silent corruption", ""),
    "W8A8 static": ("silent corruption", ""),
    "FP8 channel": ("silent corruption", ""),
    "FP8 tensor": ("silent corruption", ""),
    "fp8 dynamic": ("silent corruption", ""),
    "fp8 static": ("silent corruption", ""),
    "fp8 block": ("silent corruption", ""),
    "fbgemm_fp8": ("silent corruption", ""),
    "ModelOpt FP8": ("silent corruption", ""),
    "bnb int8": ("silent corruption", ""),
    "bnb nf4": ("shape error", ""),
    "mxfp4": ("refused", ""),
}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    root = tmp_path_factory.mktemp("atlas")
    verifier = tiny_verifier(root / "v")
    pair = sb.open_pair(verifier, tiny_draft(root / "d"))
    tensors = pack_w4a16(canonical_tensors(Shape()))
    quantized = write(root / "q", speculators(Shape(), quantization_config=w4a16_section(ignore=["fc", "lm_head"])), tensors)
    return atlas(
        pair,
        drafts={"W4A16": sb.open_pair(verifier, quantized)},
        policies=("draft", "vllm-0.11.0", "vllm-0.11.1"),
        prompts=[[5, 6, 7]],
        max_new_tokens=12,
    )


def rows(table: pd.DataFrame, draft: str, policy: str) -> pd.DataFrame:
    return table[(table.draft_format == draft) & (table.policy == policy)].set_index("verifier_format")


def test_the_plain_column_agrees_with_the_real_engine(table: pd.DataFrame) -> None:
    found = rows(table, "plain", "vllm-0.11.0")
    assert {name: (row.outcome, row.key) for name, row in found.iterrows()} == OBSERVED
    assert set(OBSERVED) == set(VERIFIER_FORMATS)


@pytest.mark.parametrize("draft", ["plain", "W4A16"])
@pytest.mark.parametrize("policy", ["draft", "vllm-0.11.1"])
def test_asking_the_drafts_own_config_loads_everything(table: pd.DataFrame, draft: str, policy: str) -> None:
    assert set(rows(table, draft, policy).outcome) == {"loads right"}


def test_a_quantized_draft_loads_only_by_luck(table: pd.DataFrame) -> None:
    """Under the verifier's rules it finds its parameters beside a verifier of the very same scheme alone."""
    found = rows(table, "W4A16", "vllm-0.11.0")
    assert found.loc["plain", "outcome"] == "KeyError" and found.loc["plain", "key"] == f"{DOWN}_packed"
    assert found.loc["AWQ", "key"] == f"{DOWN}_packed"
    assert found.loc["W4A16", "outcome"] == "shape error"  # groups of 64 beside the draft's 32
    assert "loads right" not in set(found.outcome)


def test_acceptance_is_measured_where_a_draft_was_left(table: pd.DataFrame) -> None:
    loaded = table.outcome.isin(["loads right", "silent corruption"])
    assert table.mean_acceptance_length[loaded].ge(1).all() and table.mean_acceptance_length[~loaded].isna().all()
    assert set(table.outcome) <= set(OUTCOMES)


def test_unknown_formats_are_refused(tmp_path: Path) -> None:
    pair = sb.open_pair(tiny_verifier(tmp_path / "v"), tiny_draft(tmp_path / "d"))
    with pytest.raises(ConfigError, match="'W3A16'"):
        atlas(pair, formats=["W3A16"])
