"""(slow) The bundled pairs over all shipped prompts: output with speculation is the verifier's own."""

from __future__ import annotations

import pytest

import specbench as sb
from specbench.bench.lossless import check_lossless
from specbench.bench.prompts import load_prompts


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["bf16", "w4a16"])
def test_every_prompt_in_fp32_is_token_for_token_equal(name: str) -> None:
    run = check_lossless(sb.bundled_pair(name), load_prompts(), 3, max_new_tokens=48, dtype="float32", progress=False)
    assert len(run.table) == 64 and run.table.identical.all()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["bf16", "w4a16"])
def test_in_bf16_every_difference_is_a_near_tie(name: str) -> None:
    run = check_lossless(sb.bundled_pair(name), load_prompts(), 3, max_new_tokens=48, progress=False)
    assert run.table.lossless.all(), run.table[~run.table.lossless].to_string()
