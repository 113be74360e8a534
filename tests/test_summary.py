"""Figures per configuration agree with the raw rows, leave failures out, and compare only what belongs together."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from synthetic_rows import synthetic_rows, synthetic_table

from specbench.bench import metrics
from specbench.bench.prompts import load_prompts, prompt_set_hash
from specbench.bench.records import Row, to_frame
from specbench.bench.summary import BY, grouping, per_position_rates, read_off, summarize, with_context
from specbench.errors import DataError

PROMPTS = load_prompts()[::8]


def row(question_id=1, k=0, repeat=0, turn=0, decode_s=1.0, tokens=11, accepted=(), **changes):
    values = {
        "run_id": "r", "engine": "specbench", "verifier": "v", "verifier_format": "bf16", "draft": "d", "policy": "draft", "k": k,
        "dtype": "float32", "device": "cpu", "threads": 1, "max_new_tokens": 64, "prompt_set_hash": "h", "question_id": question_id,
        "turn": turn, "category": "c", "repeat": repeat, "status": "ok", "finish_reason": "length", "num_prompt_tokens": 5,
        "num_output_tokens": tokens, "accepted_per_round": list(accepted), "proposed_per_round": [k] * len(accepted),
        "token_ids": list(range(tokens)), "prefill_s": 0.5, "draft_s": 0.25 * decode_s, "verify_s": 0.5 * decode_s,
        "other_s": 0.25 * decode_s, "decode_s": decode_s, "total_s": 0.5 + decode_s,
    }  # fmt: skip
    return Row(**(values | changes))


def failed(question_id, k):
    times = dict.fromkeys(("prefill_s", "draft_s", "verify_s", "other_s", "decode_s", "total_s"))
    return dataclasses.replace(row(question_id, k), status="failed", token_ids=[], num_output_tokens=0, **times)


def only(table, **where):
    for name, value in where.items():
        table = table[table[name] == value]
    assert len(table) == 1
    return table.iloc[0]


def test_by_hand():
    rows = [row(1, 0, decode_s=2.0), row(2, 0, decode_s=4.0)]
    rows += [row(1, 2, decode_s=1.0, accepted=(2, 1)), row(2, 2, decode_s=4.0, accepted=(0, 0, 1))]
    s = only(summarize(to_frame(rows)), k=2)
    assert s.num_prompts == 2 and s.num_rounds == 5 and s.num_failed == 0 and s.num_unlike_k0 == 0
    assert s.mean_acceptance_length == 1 + 4 / 5 and s.mean_accepted_tokens == 4 / 5 and s.draft_acceptance_rate == 4 / 10
    assert s.mean_acceptance_length_over_prompts == (2.5 + 4 / 3) / 2
    assert s.decode_tokens_per_second == 20 / 5 and s.end_to_end_tokens_per_second == 22 / 6
    assert s.speedup == pytest.approx(6 / 5) and s.speedup_low == pytest.approx(1.0) and s.speedup_high == pytest.approx(2.0)
    assert s.end_to_end_speedup == pytest.approx(7 / 6)
    assert s.break_even_length == pytest.approx((5 / 5) / (6 / 20)), "seconds per round over seconds per plain token"
    assert (s.draft_share, s.verify_share, s.other_share) == (0.25, 0.5, 0.25)
    assert np.isnan(s.decode_tokens_per_second_std_over_repeats)
    plain = only(summarize(to_frame(rows)), k=0)
    assert (plain.speedup, plain.speedup_low, plain.speedup_high) == (1, 1, 1)
    assert np.isnan(plain.draft_acceptance_rate)


def test_failed_rows_are_counted_and_left_out_of_both_sides():
    rows = [row(1, 0, decode_s=2.0), row(1, 2, accepted=(2,))]
    rows += [failed(2, 0), row(2, 2, decode_s=9.0, accepted=(0,)), failed(3, 2)]
    s = only(summarize(to_frame(rows)), k=2)
    assert s.num_failed == 1 and s.num_prompts == 2
    assert s.speedup == pytest.approx(2.0) and np.isnan(s.speedup_low), "one prompt has both sides"
    alone = only(summarize(to_frame([failed(1, 2)])), k=2)
    assert alone.num_prompts == 0 and np.isnan(alone.mean_acceptance_length) and np.isnan(alone.speedup) and np.isnan(alone.draft_share)


def test_speedup_is_within_a_run_a_repeat_and_a_prompt_set():
    rows = [row(k=0, decode_s=4.0), row(k=2, decode_s=1.0, run_id="other", accepted=(1,))]
    assert np.isnan(only(summarize(to_frame(rows)), k=2).speedup)
    rows = [row(k=k, repeat=i, decode_s=s, accepted=(k // 2,)) for i, (k, s) in enumerate([(0, 4.0), (2, 1.0)])]
    assert np.isnan(only(summarize(to_frame(rows)), k=2).speedup)
    rows = [row(k=k, prompt_set_hash=h, decode_s=s, accepted=(k // 2,)) for k, h, s in [(0, "a", 4.0), (2, "b", 1.0), (2, "a", 2.0)]]
    s = only(summarize(to_frame(rows)), k=2)
    assert s.speedup == pytest.approx(2.0) and s.num_prompts == 2


def test_repeats_do_not_pass_for_prompts():
    def figures(repeats):
        return summarize(to_frame([row(q, k, r, accepted=(min(q % 3, k),)) for q in range(6) for k in (0, 2) for r in range(repeats)]))

    once, thrice = figures(1), figures(3)
    pd.testing.assert_frame_equal(once.filter(like="mean_acceptance"), thrice.filter(like="mean_acceptance"))
    rows = [row(q, 0, r, decode_s=1 + r) for q in range(2) for r in range(2)]
    assert summarize(to_frame(rows)).decode_tokens_per_second_std_over_repeats.iloc[0] == pytest.approx(np.std([10.0, 5.0], ddof=1))


def test_one_token_outputs_and_unlike_outputs():
    rows = [row(1, 0, tokens=1, decode_s=0.0), row(1, 2, tokens=1, decode_s=0.0), row(2, 0), row(2, 2, accepted=(2,), token_ids=[5])]
    s = only(summarize(to_frame(rows)), k=2)
    assert s.decode_tokens_per_second == 10 and s.num_unlike_k0 == 1 and s.num_prompts == 2
    alone = only(summarize(to_frame(rows[:1])), k=0)
    assert np.isnan(alone.decode_tokens_per_second) and np.isnan(alone.mean_acceptance_length)


def test_against_metrics_on_many_rows():
    table = synthetic_table(prompts=PROMPTS)
    summary = summarize(table)
    assert len(summary) == 8 and list(summary.columns[:4]) == list(BY)
    for _, s in summary.iterrows():
        ok = table[(table.k == s.k) & (table.verifier_format == s.verifier_format) & (table.status == "ok")]
        accepted, proposed = list(ok.accepted_per_round), list(ok.proposed_per_round)
        assert s.mean_acceptance_length == pytest.approx(metrics.mean_acceptance_length(accepted, proposed) or np.nan, nan_ok=True)
        assert s.mean_acceptance_length_over_prompts == pytest.approx(
            metrics.mean_acceptance_length_over_prompts(accepted, proposed) or np.nan, nan_ok=True
        )
        if s.k:
            assert s.mean_acceptance_length_low <= s.mean_acceptance_length <= s.mean_acceptance_length_high
            assert (
                s.mean_acceptance_length_over_prompts_low
                <= s.mean_acceptance_length_over_prompts
                <= s.mean_acceptance_length_over_prompts_high
            )
            assert s.break_even_length * s.speedup == pytest.approx(s.mean_acceptance_length, rel=0.03), "rounds that drafted nothing apart"
        assert s.draft_share + s.verify_share + s.other_share == pytest.approx(1)
        positions = per_position_rates(ok)
        if s.k == 0:
            assert positions.empty
        else:
            np.testing.assert_allclose(positions.unconditional, metrics.acceptance_per_position(accepted, proposed, s.k))
            np.testing.assert_allclose(positions.conditional, metrics.conditional_acceptance_per_position(accepted, proposed, s.k))
            assert list(positions.position) == list(range(1, s.k + 1))


def test_position_that_no_round_reached_is_undefined():
    positions = per_position_rates(to_frame([row(1, 3, accepted=(1, 0)), row(2, 3, accepted=(0, 0))]))
    assert positions.unconditional.tolist() == [0.25, 0.0, 0.0]
    assert positions.conditional.iloc[:2].tolist() == [0.25, 0.0] and np.isnan(positions.conditional.iloc[2])


def test_a_batch_shares_one_clock():
    """Two sequences at once: the batch took as long as its slower one, and its tokens count together."""
    batch = {"batch_size": 2, "batch": 7}
    rows = [row(1, 0, decode_s=4.0, batch_size=2, batch=1), row(2, 0, decode_s=2.0, tokens=6, batch_size=2, batch=1)]
    rows += [row(1, 2, decode_s=2.0, accepted=(1,), **batch), row(2, 2, decode_s=1.0, tokens=6, accepted=(0,), **batch)]
    s = only(summarize(to_frame(rows)), k=2)
    assert s.decode_tokens_per_second == pytest.approx(15 / 2.0) and s.end_to_end_tokens_per_second == pytest.approx(17 / 2.5)
    assert s.inter_token_latency_s == pytest.approx(3.0 / 15), "of the single sequence"
    assert s.speedup == pytest.approx((15 / 2.0) / (15 / 4.0))
    mixed = pd.concat([to_frame(rows), to_frame([row(1, 0, decode_s=4.0), row(1, 2, decode_s=2.0, accepted=(1,))])])
    both = summarize(mixed)
    assert list(both.columns[:5]) == [*BY, "batch_size"] and len(both) == 4
    assert only(both, k=2, batch_size=1).speedup == pytest.approx(2.0), "against its own batch size"


def test_conditions_are_told_apart_unasked_and_pooled_when_asked():
    rows = [
        row(1, 2, temperature=t, seed=1 if t else None, top_k=k, accepted=(a,))
        for t, k, a in ((0.0, None, 2), (0.7, None, 0), (0.7, 20, 1))
    ]
    table = to_frame(rows)
    assert grouping(table) == (*BY, "temperature", "top_k")
    s = summarize(table)
    assert s.mean_acceptance_length.tolist() == [3.0, 2.0, 1.0] or sorted(s.mean_acceptance_length) == [1.0, 2.0, 3.0]
    assert summarize(table, BY).mean_acceptance_length.tolist() == [2.0]
    assert len(per_position_rates(table)) == 3 * 2


def test_costs_of_a_round_and_the_prediction():
    """Plain passes of 0.05 s; a round of k=2 verifies in 0.06 s and drafts in 0.02 s."""
    parts = {"draft_s": 0.08, "draft_prefill_s": 0.02, "verify_s": 0.30, "other_s": 0.0}
    rows = [row(1, 0, decode_s=0.5, accepted=[0] * 10, proposed_per_round=[0] * 10, draft_s=0.0, verify_s=0.5, other_s=0.0)]
    rows += [row(1, 2, decode_s=0.4, accepted=(1, 1, 1, 1, 1), **parts)]
    s = only(summarize(to_frame(rows)), k=2)
    assert s.verify_cost == pytest.approx(1.2) and s.draft_cost == pytest.approx(0.4)
    assert s.predicted_speedup == pytest.approx(2.0 / 1.6) == s.speedup == pytest.approx(0.5 / 0.4)
    assert s.draft_share == pytest.approx(0.25) and s.num_drafts == 5


def test_latencies_and_memory():
    rows = [row(1, 0, prefill_s=0.2, emitted_at_s=[0.2, 0.3, 0.5], peak_memory_bytes=10), row(2, 0, prefill_s=0.4, peak_memory_bytes=30)]
    s = summarize(to_frame(rows)).iloc[0]
    assert s.ttft_s == pytest.approx(0.3) and s.ttft_s_low == pytest.approx(0.2) and s.ttft_s_high == pytest.approx(0.4)
    assert s.emission_gap_p95_s == pytest.approx(0.195) and s.peak_memory_bytes == 30


def test_shorter_chains_are_read_off_the_longest():
    table = synthetic_table(prompts=PROMPTS)
    found = read_off(table)
    assert len(found) == 2 * 5 and set(found.longest_k) == {5}
    for r in found.itertuples():
        ok = table[(table.k == 5) & (table.verifier_format == r.verifier_format) & (table.status == "ok")]
        rates = metrics.acceptance_per_position(*metrics.full_rounds(list(ok.accepted_per_round), list(ok.proposed_per_round), 5))
        assert r.read_off == pytest.approx(1 + rates[: r.k].sum(), rel=0.03), "the rounds that the limit cut apart"
        assert r.read_off_low <= r.read_off <= r.read_off_high
    run = found[found.k.isin([1, 3, 5])]
    assert run.measured.notna().all() and found[found.k.isin([2, 4])].measured.isna().all()
    assert (run[run.k == 5].measured == run[run.k == 5].read_off).all()
    assert ((run.read_off_low < run.measured_high) & (run.measured_low < run.read_off_high)).all(), "one acceptance model made all k"


def test_prompt_lengths_in_classes():
    table = with_context(
        to_frame([row(1, num_prompt_tokens=n) for n in (5, 128, 129, 40000)] + [failed(1, 0)]).assign(question_id=range(5))
    )
    assert list(table.context.astype(object))[:4] == ["to 128", "to 128", "to 512", "over 32768"]
    assert set(summarize(table, (*BY, "context")).context.dropna()) == {"to 128", "to 512", "over 32768"}


def test_tables_that_cannot_be_summarised():
    table = to_frame(synthetic_rows(prompts=PROMPTS[:2]))
    with pytest.raises(DataError, match="decode_s"):
        summarize(table.drop(columns="decode_s"))
    with pytest.raises(DataError, match="occur twice"):
        summarize(pd.concat([table, table]))
    assert set(table.prompt_set_hash) == {prompt_set_hash(PROMPTS[:2])}
