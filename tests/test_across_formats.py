"""One draft beside tiny verifiers of several formats: every column is measured, and the prediction follows from its parts."""

from __future__ import annotations

import pandas as pd
import pytest
from stored import BY_NAME, store
from tiny import tiny_draft, verifier_config, verifier_tensors, write
from tiny_tokenizer import write_tokenizer

import specbench as sb
from specbench.bench.across_formats import COLUMNS, across_formats, compare_formats
from specbench.plot_formats import acceptance_by_format, predicted_speedup


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    root = tmp_path_factory.mktemp("across")
    draft, pairs = tiny_draft(root / "d"), {}
    for name in ("W4A16", "W8A8 dynamic"):
        case, config = BY_NAME[name], verifier_config(dtype="bfloat16")
        import torch

        tensors, _ = store(verifier_tensors(config, 0, torch.bfloat16), case)
        folder = write(root / name.replace(" ", "-"), {**config, "quantization_config": case.section}, tensors)
        pairs[name] = sb.open_pair(write_tokenizer(folder), draft)
    prompts = root / "prompts.jsonl"
    prompts.write_text("".join(f'{{"question_id": {i}, "category": "c{i}", "turns": ["Say {i}."]}}\n' for i in (1, 2)))
    return across_formats(
        pairs, str(prompts), num_speculative_tokens=2, max_new_tokens=10, perplexity_ids=lambda _: [[5, 6, 7, 8, 9]], progress=False
    )


def test_every_column_is_measured(table: pd.DataFrame) -> None:
    assert list(table.columns) == list(COLUMNS) and list(table.verifier_format) == ["W4A16", "W8A8 dynamic"]
    assert table.notna().all().all()
    assert (table.mean_acceptance_length >= 1).all() and (table.verify_cost > 0).all() and (table.perplexity > 1).all()


def test_the_prediction_follows_from_its_parts(table: pd.DataFrame) -> None:
    parts = table.mean_acceptance_length / (table.verify_cost + table.draft_cost)
    assert (table.predicted_speedup / parts - 1).abs().max() < 1e-9


def test_figures(table: pd.DataFrame) -> None:
    ax = acceptance_by_format(table)
    assert ax.get_ylabel().startswith("mean acceptance length") and "ppl" in ax.get_xticklabels()[0].get_text()
    ax = predicted_speedup(table)
    assert ax.get_xlim() == ax.get_ylim() and "predicted" in ax.get_xlabel()


def test_no_format_is_an_empty_table() -> None:
    empty = compare_formats([], [])
    assert empty.empty and list(empty.columns) == list(COLUMNS)
