"""The benchmark on real tiny pairs: rows agree with decoding, with transformers and with what lies on disk, also when something fails."""

import json
from dataclasses import replace

import pandas as pd
import pytest
from planted import planted_pair
from tiny_tokenizer import write_tokenizer
from transformers import AutoTokenizer

import specbench as sb
from specbench import text
from specbench.bench.arms import format_name
from specbench.bench.baseline import rounds
from specbench.bench.prompts import Prompt, prompt_set_hash
from specbench.bench.records import load_runs
from specbench.bench.runner import WARM_UP_TOKENS, benchmark, conversation_ids, transformers_baseline
from specbench.bench.summary import read_off, summarize
from specbench.errors import CheckpointKeyError, ConfigError, DataError

PROMPTS = [Prompt(11, "math", ("What is 6 x 7?",)), Prompt(5, "writing", ("Write a line about rain.", "Now about snow."))]
KS = (0, 1, 3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    verifier, draft = planted_pair(root / "plain")
    return {"fp32": verifier, "w4a16": planted_pair(root / "packed", quantized=True)[0], "draft": draft}


@pytest.fixture(scope="module")
def pair(folders):
    return sb.open_pair(folders["fp32"], folders["draft"])


@pytest.fixture(scope="module")
def run(pair, tmp_path_factory):
    """One run with everything on: (its folder, its table)."""
    folder = tmp_path_factory.mktemp("run")
    table = benchmark(pair, PROMPTS, KS, repeats=2, max_new_tokens=24, baseline=pair.verifier, run_dir=folder, device="cpu", progress=False)
    return folder, table


def test_one_row_per_turn_arm_and_repeat(run):
    _, table = run
    assert len(table) == 3 * (len(KS) + 1) * 2
    assert not table.duplicated(["engine", "k", "question_id", "turn", "repeat"]).any()
    assert set(table.status) == {"ok"} and set(table.error) == {""}
    assert table[table.repeat == 0].question_id.tolist() == [11] * 4 + [5] * 8, "file order"
    row = table[table.engine == "specbench"].iloc[0]
    assert (row.verifier_format, row["dtype"], row.device, row.policy, row.temperature) == ("fp32", "float32", "cpu", "draft", 0.0)


def test_counts_agree_with_the_outputs(run):
    _, table = run
    own = table[table.engine == "specbench"]
    for row in own.itertuples():
        emitted = 1 + sum(accepted + 1 for accepted in row.accepted_per_round)
        assert len(row.token_ids) == row.num_output_tokens <= emitted <= row.num_output_tokens + (row.finish_reason == "eos")
        assert len(row.proposed_per_round) == len(row.accepted_per_round)
        assert all(0 <= a <= p <= row.k for a, p in zip(row.accepted_per_round, row.proposed_per_round, strict=True))
        assert row.finish_reason == ("length" if row.num_output_tokens == 24 else "eos")
        assert row.decode_s == pytest.approx(row.draft_prefill_s + row.draft_s + row.verify_s + row.other_s)
        assert row.total_s == pytest.approx(row.prefill_s + row.decode_s)
        assert min(row.prefill_s, row.verify_s, row.other_s) >= 0
    assert set(own[own.k == 0].proposed_per_round.map(sum)) == {0}
    counts = {int(a) for accepted in own[own.k == 3].accepted_per_round for a in accepted}
    assert counts == {0, 1, 2, 3}, "the pair accepts every number of tokens, or this test says little"


def test_every_arm_writes_the_same_text(run):
    """fp32, greedy: k = 0, 1, 3 and transformers' generate agree token for token, so speeds compare the same work."""
    _, table = run
    for _, group in table.groupby(["question_id", "turn", "repeat"]):
        assert len(group) == len(KS) + 1
        assert len({tuple(ids) for ids in group.token_ids}) == 1
        assert group.num_prompt_tokens.nunique() == 1
    assert summarize(table).num_unlike_k0.tolist() == [0] * 4


def test_rows_are_what_generate_gives(run, pair):
    _, table = run
    verifier = sb.load_verifier(pair, device="cpu")
    out = sb.generate(verifier, sb.load_draft(pair, device="cpu"), PROMPTS[0].turns[0], num_speculative_tokens=3, max_new_tokens=24)
    row = table[(table.engine == "specbench") & (table.k == 3) & (table.question_id == 11) & (table.repeat == 0)].iloc[0]
    assert list(row.token_ids) == out.token_ids[0] and list(row.accepted_per_round) == out.accepted_per_round[0]
    single = summarize(table[(table.question_id == 11) & (table.k == 3)])
    assert single.mean_acceptance_length.iloc[0] == pytest.approx(out.mean_acceptance_length)


def test_batches_temperatures_and_trees(pair, tmp_path):
    """Every combination is an arm; in fp32 greedy outputs do not depend on batch size, chain or tree."""
    prompts = [*PROMPTS, Prompt(7, "math", ("And 3 x 9?", "Sure?"))]
    table = benchmark(
        pair, prompts, (0, 2), trees=[(2, 2, 4)], batch_size=[1, 2], temperature=[0.0, 0.9], top_k=20, seed=5, max_new_tokens=12,
        run_dir=tmp_path, device="cpu", progress=False,
    )  # fmt: skip
    assert len(table) == 5 * 3 * 2 * 2 and set(table.status) == {"ok"}
    shapes = {"chain", "tree depth 2 top_k 2 nodes 4"}
    assert set(table.draft_shape) == shapes and set(table[table.k == 0].draft_shape) == {"chain"}
    for _, group in table.groupby(["temperature", "question_id", "turn"]):
        assert len({tuple(ids) for ids in group.token_ids}) == 1, "a seed belongs to a prompt, turn and repeat, not to a batch"
        assert group.seed.nunique() == (0 if group.temperature.iloc[0] == 0 else 1)
    assert set(table[table.temperature > 0].top_k) == {20} and table[table.temperature == 0].top_k.isna().all()
    tree = table[table.draft_shape != "chain"]
    assert all(all(n == 4 for n, p in zip(r.nodes_per_round, r.proposed_per_round, strict=True) if p == 2) for r in tree.itertuples())
    assert all(len(r.emitted_at_s) == len(r.accepted_per_round) + 1 for r in table.itertuples())
    sizes = table[(table.batch_size == 2) & (table.k == 0) & (table.temperature == 0)].groupby("batch").size()
    assert sorted(sizes) == [1, 1, 1, 2], "two first turns together, then the one second turn, then the third prompt's two"

    summary = summarize(table)
    assert {"batch_size", "temperature", "draft_shape"} <= set(summary.columns) and len(summary) == 3 * 2 * 2
    assert set(summary.num_unlike_k0) == {0} and summary.speedup.notna().all()
    assert (summary[summary.k == 0].speedup - 1).abs().max() < 1e-9


def test_adaptive_chains_and_penalties(pair, tmp_path):
    """A chain of chosen lengths is told apart from one of k, and penalties are kept with the rows; the text is that of k = 0."""
    settings = {"repetition_penalty": 1.3, "frequency_penalty": 0.2}
    table = benchmark(pair, PROMPTS, (0, 3), adaptive=3, **settings, max_new_tokens=40, run_dir=tmp_path, device="cpu", progress=False)
    assert len(table) == 3 * 3 and set(table.status) == {"ok"}
    for _, group in table.groupby(["question_id", "turn"]):
        assert len({tuple(ids) for ids in group.token_ids}) == 1
    assert set(table.repetition_penalty) == {1.3} and set(table.frequency_penalty) == {0.2} and table.presence_penalty.isna().all()
    verifier = sb.load_verifier(pair, device="cpu")
    asked = {"num_speculative_tokens": 0, "max_new_tokens": 40}
    penalised, plain = (sb.generate(verifier, None, PROMPTS[0].turns[0], **asked, **more).token_ids[0] for more in (settings, {}))
    assert list(table[table.question_id == 11].token_ids.iloc[0]) == penalised != plain
    adaptive = table[table.draft_shape == "adaptive chain"]
    assert set(adaptive.k) == {3} and set(table[table.k == 0].draft_shape) == {"chain"}
    lengths = {int(p) for row in adaptive.itertuples() for p in row.proposed_per_round}
    assert 0 in lengths, "it begins without drafting, to learn what a plain round costs"
    summary = summarize(table)
    assert len(summary) == 3 and set(summary[summary.k > 0].draft_shape) == {"chain", "adaptive chain"} and summary.speedup.notna().all()
    chosen = summary[summary.draft_shape == "adaptive chain"].iloc[0]
    assert pd.isna([chosen.verify_cost, chosen.break_even_length, chosen.predicted_speedup]).all(), "rounds of different lengths"


def test_chains_that_end_in_doubt(pair, tmp_path):
    table = benchmark(
        pair, PROMPTS, (0, 3), draft_p_min=(0.0, 0.9999), temperature=0.9, max_new_tokens=24, run_dir=tmp_path, device="cpu", progress=False
    )
    assert len(table) == 3 * 3 and set(table.status) == {"ok"} and table[table.k == 0].draft_p_min.isna().all()
    assert all(len({tuple(ids) for ids in group.token_ids}) == 1 for _, group in table.groupby(["question_id", "turn"]))
    whole, cut = table[(table.k == 3) & table.draft_p_min.isna()], table[table.draft_p_min == 0.9999]
    assert len(cut) == 3 and sum(map(sum, cut.proposed_per_round)) < sum(map(sum, whole.proposed_per_round))
    summary = summarize(table).set_index("draft_p_min", append=True)
    assert len(summary) == 3 and summary.speedup.notna().all()
    assert list(read_off(table).num_prompts) == [2, 2, 2], "shorter chains are read off whole ones"


def test_one_prompt_too_long_does_not_stop_its_batch(pair, tmp_path):
    prompts = [Prompt(1, "a", ("short",)), Prompt(2, "b", ("x" * 600,)), Prompt(3, "a", ("also short",))]
    table = benchmark(pair, prompts, (0, 2), batch_size=3, max_new_tokens=6, run_dir=tmp_path, device="cpu", progress=False)
    assert table.groupby("question_id").status.unique().map(list).to_dict() == {1: ["ok"], 2: ["failed"], 3: ["ok"]}


def test_what_stops_a_batch_is_told_in_each_of_its_rows(pair, tmp_path, monkeypatch):
    real = text.generate

    def stops(*args, **kwargs):
        if kwargs["num_speculative_tokens"] and kwargs["max_new_tokens"] == 6:
            raise RuntimeError("out of memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(text, "generate", stops)
    table = benchmark(pair, ["one", "two"], (0, 2), batch_size=2, max_new_tokens=6, run_dir=tmp_path, device="cpu", progress=False)
    failed = table[table.status == "failed"]
    assert failed.question_id.tolist() == [1, 2] and set(failed.error) == {"RuntimeError: out of memory (in a batch of 2)"}
    assert set(table[table.k == 0].status) == {"ok"}


def test_prompt_lookup_is_a_labelled_baseline(pair, tmp_path):
    prompts = [Prompt(1, "copy", ("the cat sat on the mat, " * 4,)), *PROMPTS]
    options = {"max_new_tokens": 40, "baseline": pair.verifier, "run_dir": tmp_path, "device": "cpu", "progress": False}
    table = benchmark(pair, prompts, (0,), prompt_lookup=4, **options)
    other = table[table.engine == "transformers"]
    assert set(zip(other.k, other.proposer, strict=True)) == {(0, ""), (4, "prompt lookup")}
    for _, group in table.groupby(["question_id", "turn"]):
        assert len(group) == 3 and len({tuple(ids) for ids in group.token_ids}) == 1, "assisted decoding is greedy decoding"
    assisted = other[other.k == 4]
    assert any(sum(row.proposed_per_round) for row in assisted.itertuples())
    for row in assisted.itertuples():
        rounds = sum(accepted + 1 for accepted in row.accepted_per_round)
        by_prompt_pass = row.num_output_tokens - rounds
        assert 0 <= by_prompt_pass <= 5, "0 where the end cut the last round's bonus"
        assert all(0 <= a <= p <= 4 for a, p in zip(row.accepted_per_round, row.proposed_per_round, strict=True))
    summary = summarize(table)
    s = summary[(summary.engine == "transformers") & (summary.k == 4)].iloc[0]
    assert s.num_drafts <= s.num_rounds and s.speedup > 0
    for wrong in ({"prompt_lookup": -1}, {"prompt_lookup": 2, "baseline": None}):
        with pytest.raises(DataError, match="prompt_lookup"):
            benchmark(pair, ["x"], 0, **{**options, "run_dir": tmp_path / "w", **wrong})


@pytest.mark.parametrize(
    ("blocks", "lengths", "sequence", "expected"),
    [
        ([[0] * 3, [7, 1, 2, 9], [3]], [4, 7, 8], [0, 0, 0, 7, 1, 2, 3, 4], ([2, 0], [3, 0])),  # two of three kept, then none proposed
        ([[0] * 3, [7, 1, 2, 2]], [4, 5], [0, 0, 0, 7, 1], ([1], [1])),  # an end among the proposals: counted up to it
        ([[0] * 3, [7, 1]], [4, 6], [0, 0, 0, 7, 1, 2], ([1], [1])),  # all kept, then the bonus
        ([[0] * 3, [7, 1, 2]], [4, 5], [0, 0, 0, 7, 5], ([0], [2])),  # rejected at once
        ([], [4, 5], [0, 0, 0, 7, 5], ([], [])),
    ],
)
def test_rounds_of_assisted_decoding_by_hand(blocks, lengths, sequence, expected):
    assert rounds(blocks, lengths, sequence) == expected


def test_later_turns_follow_the_answer(run, folders):
    _, table = run
    tokenizer = AutoTokenizer.from_pretrained(folders["fp32"])
    first, second = (table[(table.question_id == 5) & (table.turn == turn)].iloc[0] for turn in (0, 1))
    answer = tokenizer.decode(first.token_ids, skip_special_tokens=True)
    ids = conversation_ids(tokenizer, PROMPTS[1].turns, [answer])
    said = tokenizer.decode(ids)
    assert second.num_prompt_tokens == len(ids)
    assert said == f"<|user|>{PROMPTS[1].turns[0]}<|assistant|>{answer}<|user|>{PROMPTS[1].turns[1]}<|assistant|>"


def test_conversations_without_a_template(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path, template=None))
    assert tokenizer.decode(conversation_ids(tokenizer, ("ab",), ())) == "ab"
    assert tokenizer.decode(conversation_ids(tokenizer, ("ab", "cd"), ("x",))).replace("<unk>", "\n") == "ab\nx\ncd\n"


def test_transformers_times_have_no_parts(run):
    _, table = run
    rows = table[table.engine == "transformers"]
    assert set(rows.k) == {0} and set(rows.draft) == {""}
    assert rows[["draft_s", "verify_s", "other_s"]].isna().all(axis=None)
    assert (rows.prefill_s > 0).all() and (rows.decode_s > 0).all()
    assert (rows.prefill_s + rows.decode_s - rows.total_s).abs().max() < 1e-9
    assert rows.accepted_per_round.map(len).max() == 0


def test_folder_holds_the_table_and_its_provenance(run, recwarn):
    folder, table = run
    pd.testing.assert_frame_equal(load_runs(folder), table)
    assert not recwarn.list
    facts = json.loads((folder / "provenance.json").read_text())
    assert facts["complete"] is True and facts["run_id"] == f"{folder.parent.name}/{folder.name}" == table.run_id.iloc[0]
    assert facts["prompts"]["sha256"] == prompt_set_hash(PROMPTS) == table.prompt_set_hash.iloc[0]
    assert facts["parameters"]["prompts"] == "given by the caller"
    assert facts["parameters"] | {"k": [0, 1, 3], "repeats": 2, "ignore_eos": False, "temperature": [0.0]} == facts["parameters"]
    assert set(facts["checkpoints"]) == {"verifier", "draft", "baseline"}
    assert facts["checkpoints"]["draft"]["files"]["model.safetensors"]["sha256"]


def test_arms_take_turns_after_a_warm_up(pair, tmp_path, monkeypatch):
    calls = []
    real = text.generate

    def spy(*args, **kwargs):
        calls.append((kwargs["num_speculative_tokens"], kwargs["max_new_tokens"]))
        return real(*args, **kwargs)

    monkeypatch.setattr(text, "generate", spy)
    table = benchmark(pair, ["one", "two", "three"], KS, max_new_tokens=5, run_dir=tmp_path, device="cpu", progress=False)
    assert calls[:3] == [(k, WARM_UP_TOKENS) for k in KS]
    assert [k for k, _ in calls[3:]] == [0, 1, 3, 1, 3, 0, 3, 0, 1]
    assert len(table) == 9 and table.k.tolist() == [0, 1, 3] * 3


def test_a_failed_prompt_is_a_failed_row(pair, tmp_path):
    prompts = [Prompt(1, "a", ("short",)), Prompt(2, "b", ("x" * 600, "and then?")), Prompt(3, "a", ("also short",))]
    table = benchmark(pair, prompts, (0, 3), max_new_tokens=8, baseline=pair.verifier, run_dir=tmp_path, device="cpu", progress=False)
    failed = table[table.status == "failed"]
    assert set(failed.question_id) == {2} and len(failed) == 2 * 3
    assert failed[failed.turn == 0].error.str.contains("context").all() and (failed[failed.turn == 0].num_prompt_tokens > 600).all()
    assert failed[failed.turn == 1].error.str.contains("turn 0 has no answer").all()
    assert failed.decode_s.isna().all() and (failed.num_output_tokens == 0).all()
    ok = summarize(table[table.status == "ok"])
    assert set(table[table.status == "ok"].question_id) == {1, 3}
    columns = [name for name in ok.columns if name != "num_failed"]
    pd.testing.assert_frame_equal(summarize(table)[columns], ok[columns])


def test_an_interrupted_run_keeps_what_it_has(pair, tmp_path, monkeypatch):
    real, done = text.generate, []

    def stops(*args, **kwargs):
        done.append(1)
        if len(done) > 2 + 2 * 2:  # warm-ups, then two prompts
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(text, "generate", stops)
    with pytest.raises(KeyboardInterrupt):
        benchmark(pair, ["one", "two", "three"], (0, 1), max_new_tokens=5, run_dir=tmp_path, device="cpu", progress=False)
    facts = json.loads((tmp_path / "provenance.json").read_text())
    assert facts["complete"] is False and facts["stopped_by"].startswith("KeyboardInterrupt")
    with pytest.warns(UserWarning, match="not finished"):
        table = load_runs(tmp_path)
    assert table.question_id.tolist() == [1, 1, 2, 2] and set(table.status) == {"ok"}


def test_a_pair_that_does_not_load_leaves_its_provenance(folders, tmp_path):
    broken = sb.open_pair(folders["w4a16"], folders["draft"])
    with pytest.raises(CheckpointKeyError, match=r"layers\.0\."):
        benchmark(broken, ["x"], (0, 1), policy="vllm-0.11.0", run_dir=tmp_path, device="cpu", progress=False)
    facts = json.loads((tmp_path / "provenance.json").read_text())
    assert facts["complete"] is False and facts["stopped_by"].startswith("CheckpointKeyError")
    assert facts["parameters"]["policy"] == "vllm-0.11.0"


def test_b112_plain_decoding_alone_needs_no_draft(folders, tmp_path):
    """The same policy that cannot load this draft runs at k = 0: nothing of the draft is touched."""
    broken = sb.open_pair(folders["w4a16"], folders["draft"])
    table = benchmark(broken, ["x"], 0, max_new_tokens=4, policy="vllm-0.11.0", run_dir=tmp_path, device="cpu", progress=False)
    assert table.status.tolist() == ["ok"] and table.verifier_format.tolist() == ["w4a16"]


def test_transformers_alone(folders, run, tmp_path):
    table = transformers_baseline(folders["fp32"], PROMPTS[:1], 24, run_dir=tmp_path, device="cpu", progress=False)
    other = run[1][(run[1].engine == "transformers") & (run[1].question_id == 11)]
    assert list(table.token_ids.iloc[0]) == list(other.token_ids.iloc[0]) and table.engine.tolist() == ["transformers"]
    pd.testing.assert_frame_equal(load_runs(tmp_path), table)


def test_eos_is_counted_and_ends_the_row(run, tmp_path):
    """The id that the verifier writes fifth becomes its EOS: both loops stop there and count it."""
    fifth = int(run[1][run[1].question_id == 11].token_ids.iloc[0][4])
    stopping = sb.open_pair(*planted_pair(tmp_path, eos_token_id=fifth))
    options = {"max_new_tokens": 24, "baseline": stopping.verifier, "device": "cpu", "progress": False}
    table = benchmark(stopping, PROMPTS[:1], KS, run_dir=tmp_path / "run", **options)
    expected = list(run[1][run[1].question_id == 11].token_ids.iloc[0][:5])
    expected = expected[: expected.index(fifth) + 1]
    assert all(list(ids) == expected for ids in table.token_ids) and set(table.finish_reason) == {"eos"}


def test_format_names(folders):
    pair = sb.open_pair(folders["w4a16"], folders["draft"])
    assert format_name(pair.verifier, "bfloat16") == "w4a16"
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    section = pair.verifier.quantization
    asymmetric = {**section, "config_groups": {"group_0": {**section["config_groups"]["group_0"]}}}
    weights = section["config_groups"]["group_0"]["weights"]
    asymmetric["config_groups"]["group_0"]["weights"] = {**weights, "symmetric": False}
    named = {"fp8": fp8, "awq-w4a16": awq, "w4a16-asym": asymmetric}
    for name, declared in named.items():
        assert format_name(replace(pair.verifier, quantization=declared), "bfloat16") == name
    assert [format_name(pair.draft, name) for name in ("bfloat16", "float16", "float32", "float64")] == ["bf16", "fp16", "fp32", "float64"]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"k": k} for k in [(), (3, 3), (-1,), True, (1.0,)]),
        {"repeats": 0},
        {"max_new_tokens": 0},
        {"prompts": []},
        {"batch_size": 0},
        {"batch_size": []},
        {"temperature": -1.0},
        {"temperature": "0"},
        {"adaptive": 0},
        {"adaptive": [2, 2]},
    ],
)
def test_wrong_arguments_leave_no_folder(pair, wrong, tmp_path):
    with pytest.raises(DataError):
        benchmark(pair, **({"prompts": ["x"], "run_dir": tmp_path / "run", "progress": False} | wrong))
    assert not (tmp_path / "run").exists()


def test_penalties_and_a_baseline_without_them_are_not_compared(pair, tmp_path):
    with pytest.raises(DataError, match="plain greedy"):
        benchmark(pair, ["x"], presence_penalty=0.5, baseline=pair.verifier, run_dir=tmp_path / "run", progress=False)
    with pytest.raises(ConfigError, match="presence_penalty is 7"):
        benchmark(pair, ["x"], presence_penalty=7, run_dir=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_used_folder_is_refused(pair, run):
    with pytest.raises(DataError, match="already holds"):
        benchmark(pair, ["x"], run_dir=run[0], device="cpu", progress=False)
