"""Streams: an update per round, cancelling, and the ends of an output: EOS, stop strings, limits."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from planted import planted_pair
from proposers import prompts
from test_batch import ranges_table, table_outputs
from toy import Scripted, TableVerifier

import specbench as sb
from specbench.decode.engine import Run
from specbench.decode.request import Options, Request, Sampling
from specbench.decode.sequence import Active
from specbench.errors import ConfigError
from specbench.text import decode_text, load_tokenizer, stop_strings, stream

GIVEN = prompts(3, seed=6)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    pair = sb.open_pair(*planted_pair(tmp_path_factory.mktemp("planted")))
    verifier = sb.load_verifier(pair, device="cpu")
    return verifier, sb.load_draft(pair, device="cpu", verifier=verifier)


def begin(planted, given=GIVEN, k: int = 3, n: int = 24, **options: Any):
    verifier, draft = planted
    return stream(
        verifier, draft if k else None, given, **{"num_speculative_tokens": k, "max_new_tokens": n, "ignore_eos": True, **options}
    )


@pytest.mark.parametrize("batch", [1, 3])
def test_updates_are_the_rounds_and_add_up_to_the_output(planted, batch: int) -> None:
    running = begin(planted, batch_size=batch)
    found: dict[int, list[Any]] = {}
    for update in running:
        assert update.token_ids or update.finish_reason is not None
        found.setdefault(update.request, []).append(update)
        so_far = running.result()[update.request]
        assert so_far.token_ids == [t for u in found[update.request] for t in u.token_ids], "what was delivered is what there is"
        assert so_far.finish_reason == (update.finish_reason or "cancelled")
    result = running.result()
    for index, updates in found.items():
        generation = result[index]
        assert [u.accepted for u in updates] == [0, *generation.accepted_per_round]
        assert [u.proposed for u in updates] == [0, *generation.proposed_per_round]
        assert [len(u.token_ids) for u in updates] == [1, *(a + 1 for a in generation.accepted_per_round)]
        assert [u.finish_reason for u in updates[:-1]] == [None] * (len(updates) - 1) and updates[-1].finish_reason == "length"
        assert len(generation.emitted_at_s) == len(updates) and generation.emitted_at_s == sorted(generation.emitted_at_s)
    assert any(len(u.token_ids) > 1 for updates in found.values() for u in updates)
    assert result.token_ids == sb.generate(*planted, GIVEN, max_new_tokens=24, ignore_eos=True).token_ids


def test_the_first_tokens_come_before_anything_is_drafted(planted) -> None:
    running = begin(planted, GIVEN[:1])
    first = next(running)
    assert (len(first.token_ids), first.accepted, first.proposed) == (1, 0, 0)
    assert running.result()[0].accepted_per_round == []


@pytest.mark.parametrize("how", ["close", "break"])
@pytest.mark.parametrize("batch", [1, 2])
def test_closing_early_leaves_what_there_is(planted, how: str, batch: int) -> None:
    """One finished, one or two on their way, the rest not begun."""
    whole = begin(planted, batch_size=batch)
    for _ in whole:
        pass
    running = begin(planted, batch_size=batch)
    for count, _ in enumerate(running):
        if count == 5:
            break
    if how == "close":
        running.close()
        assert list(running) == []
    partial = running.result()
    assert len(partial) == 3 and len(partial.text) == 3
    for ours, theirs, text in zip(partial, whole.result(), partial.text, strict=True):
        assert ours.token_ids == theirs.token_ids[: len(ours.token_ids)]
        assert ours.finish_reason == ("length" if len(ours.token_ids) == 24 else "cancelled")
        assert len(ours.token_ids) == sum(ours.accepted_per_round) + len(ours.accepted_per_round) + bool(ours.token_ids)
        assert text == decode_text(running.tokenizer, ours.token_ids)
    assert partial[2].token_ids == [] and 0 < len(partial[0].token_ids) < 24
    assert partial.mean_acceptance_length >= 1 or batch == 2


def test_a_partial_result_stays_as_it_was(planted) -> None:
    running = begin(planted, GIVEN[:1], logprobs=1)
    for _ in range(4):
        next(running)
    partial = running.result()[0]
    before = repr(partial), list(partial.emitted_at_s), len(partial.logprobs or []), partial.timing.decode_s
    for _ in running:
        pass
    assert (repr(partial), list(partial.emitted_at_s), len(partial.logprobs or []), partial.timing.decode_s) == before


def test_a_stream_that_was_left_can_be_taken_up_again(planted) -> None:
    running = begin(planted)
    for count, _ in enumerate(running):
        if count == 3:
            break
    for _ in running:
        pass
    assert {g.finish_reason for g in running.result()} == {"length"}


@pytest.mark.parametrize("batch", [1, 3])
def test_the_receivers_time_is_not_decoding_time(planted, batch: int) -> None:
    running, away = begin(planted, n=8, batch_size=batch), 0.0
    begun = time.perf_counter()
    for _ in running:
        left = time.perf_counter()
        time.sleep(0.05)
        away += time.perf_counter() - left
    inside = time.perf_counter() - begun - away
    result = running.result()
    total = sum(g.timing.total_s for g in result) if batch == 1 else max(g.timing.total_s for g in result)
    assert total <= inside and away > 0.3
    assert all(g.emitted_at_s[-1] <= inside for g in result)


# --- the end of an output


def ended(new: list[int], limit: int, stops: tuple[int, ...] = (), ends_at: Any = None, output: tuple[int, ...] = ()):
    """What a sequence keeps of a round's tokens, and why it ends."""
    request = Request([1], limit, ends_at=ends_at)
    sequence = Active(0, request, [1, *output], 1 + limit, "length", frozenset(stops), 0, 0.0)
    kept, reason = sequence.keep(new)
    assert sequence.tokens == [1, *output, *kept]
    return kept, reason


def test_b081_a_stop_inside_a_block_and_the_limit() -> None:
    """A stop counts where it stands within the limit, also on the limit's last token, as it does without speculation."""
    stop, block = 12, [10, 11, 12, 20, 21, 22]
    assert ended(block, 5, (stop,)) == ([10, 11, 12], "eos")
    assert ended(block, 3, (stop,)) == ([10, 11, 12], "eos")
    assert ended(block, 2, (stop,)) == ([10, 11], "length")
    assert ended([10, 11, 20, 21, 22, stop], 5, (stop,)) == ([10, 11, 20, 21, 22], "length")
    assert ended(block, 9) == (block, None)
    one_by_one = [ended([token], 3, (stop,), output=tuple(block[:i])) for i, token in enumerate(block[:3])]
    assert [reason for _, reason in one_by_one] == [None, None, "eos"], "the reason of the loop without speculation"


@pytest.mark.parametrize(("limit", "length", "reason"), [(5, 3, "eos"), (3, 3, "eos"), (2, 2, "length"), (9, 3, "eos")])
def test_b081_in_the_loop(limit: int, length: int, reason: str) -> None:
    table = ranges_table(1, 40)
    outputs = table_outputs(table, [Request([7], 9)])
    assert outputs[0][2] not in outputs[0][:2]
    for k in (0, 1, 2, 5):
        made = [Request([7], limit, stop_ids=[outputs[0][2]])]
        run = Run(TableVerifier(table), Scripted([[7]], outputs, [[]], 40) if k else None, made, Options(k))
        delivered = [t for update in run for t in update.token_ids]
        generation = run.generations()[0]
        assert delivered == generation.token_ids == outputs[0][:length] and generation.finish_reason == reason


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 5, 6])
def test_b082_an_end_token_anywhere_in_a_block(k: int) -> None:
    """A perfect draft; the token of step 6 ends the text, another place of its block for each k. A stream delivers nothing after it."""
    table = ranges_table(1, 60, seed=2)
    outputs = table_outputs(table, [Request([5], 20)])
    end = outputs[0][6]
    assert end not in outputs[0][:6]
    verifier = TableVerifier(table)
    verifier.eos_ids = frozenset([end])
    run = Run(verifier, Scripted([[5]], outputs, [[]], 60) if k else None, [Request([5], 20)], Options(k))
    updates = list(run)
    assert [t for u in updates for t in u.token_ids] == outputs[0][:7] and updates[-1].token_ids[-1] == end
    assert [u.finish_reason for u in updates][-1] == "eos" and not any(u.finish_reason for u in updates[:-1])
    generation = run.generations()[0]
    assert generation.accepted_per_round == ([k] * (6 // (k + 1)) + ([6 % (k + 1)] if 6 % (k + 1) else []))
    assert generation.proposed_per_round == generation.accepted_per_round, "a round that a stop ended counts as far as the stop"


def test_ignore_eos_decodes_on(planted) -> None:
    verifier, draft = planted
    expected = sb.generate(verifier, None, GIVEN[:1], num_speculative_tokens=0, max_new_tokens=16, ignore_eos=True)[0]
    kept, verifier.eos_ids = verifier.eos_ids, frozenset([expected.token_ids[5]])
    try:
        at = expected.token_ids.index(expected.token_ids[5]) + 1
        for k in (0, 3):
            stopped = sb.generate(verifier, draft, GIVEN[:1], num_speculative_tokens=k, max_new_tokens=16)[0]
            assert (stopped.token_ids, stopped.finish_reason) == (expected.token_ids[:at], "eos")
            on = sb.generate(verifier, draft, GIVEN[:1], num_speculative_tokens=k, max_new_tokens=16, ignore_eos=True)[0]
            assert (on.token_ids, on.finish_reason) == (expected.token_ids, "length")
    finally:
        verifier.eos_ids = kept


# --- stop strings


class Letters:
    """Token i is the letter i of the alphabet."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(97 + i) for i in ids)


class Bytes:
    """Tokens are bytes: characters span several, and what is incomplete is a replacement character."""

    def decode(self, ids, skip_special_tokens=True):
        return bytes(ids).decode(errors="replace")


def test_b084_text_ids_and_log_probabilities_end_together() -> None:
    """ "bc" is completed by the third of seven accepted tokens."""
    table = torch.full((1, 26, 26), -5.0)
    table[0, torch.arange(25), torch.arange(1, 26)] = 5.0  # every letter is followed by the next
    made = [Request([24], 20, ends_at=stop_strings(Letters(), ["bc"]), logprobs=2)]
    table[0, 25, 0] = 9.0
    outputs = table_outputs(table, made)
    assert Letters().decode(outputs[0][:8]) == "zabcdefg"
    for k in (0, 1, 2, 7):
        run = Run(TableVerifier(table), Scripted([[24]], outputs, [[]], 26) if k else None, made, Options(k))
        delivered = [t for update in run for t in update.token_ids]
        generation = run.generations()[0]
        assert generation.finish_reason == "stop" and delivered == generation.token_ids
        assert Letters().decode(generation.token_ids) == "zabc"
        assert generation.logprobs is not None and len(generation.logprobs) == 4
        assert 1 + sum(generation.accepted_per_round) + len(generation.accepted_per_round) in (4, 5), "counts end there too"


def ends(tokenizer: Any, stops: list[str], output: list[int], block: int) -> int | None:
    """Where `output` is found to end when it comes in blocks."""
    look = stop_strings(tokenizer, stops)
    for start in range(0, len(output), block):
        so_far = output[: start + block]
        found = look(so_far, len(so_far) - start)
        if found is not None:
            return found
    return None


@pytest.mark.parametrize("block", [1, 2, 3, 5, 100])
def test_stop_strings_are_found_across_blocks_and_tokens(block: int) -> None:
    letters = [ord(c) - 97 for c in "thequickbrownfox"]
    assert ends(Letters(), ["kbr"], letters, block) == 10
    assert ends(Letters(), ["zzz", "own", "ick"], letters, block) == 8, "the first that is complete"
    assert ends(Letters(), ["t"], letters, block) == 1
    assert ends(Letters(), ["foxx", "tt"], letters, block) is None
    text = "これはとても長い停止文字列を試すための文章です。終わり"
    for stop in ("停止文字列", "とても長い停止文字列を試すための文章です", "。"):
        expected = len(text[: text.index(stop) + len(stop)].encode())
        assert ends(Bytes(), [stop], list(text.encode()), block) == expected, stop


def test_stop_strings_in_the_text_of_a_pair(planted) -> None:
    """Any two characters of an output, wherever a block ends: the output is cut behind their first occurrence, for every k and tree."""
    verifier, draft = planted
    whole = sb.generate(verifier, None, GIVEN, num_speculative_tokens=0, max_new_tokens=20, ignore_eos=True)
    tokenizer = load_tokenizer(verifier)
    for row, text in enumerate(whole.text):
        assert len(text) >= 15
        for at in (0, 7):
            stop = text[at : at + 2]
            wanted = text[: text.index(stop) + 2]
            for shape in ({"num_speculative_tokens": 0}, {"num_speculative_tokens": 4}, {"tree": (3, 3, 8)}):
                found = sb.generate(verifier, draft, [GIVEN[row]], max_new_tokens=20, ignore_eos=True, stop=stop, logprobs=0, **shape)
                assert found.text == [wanted] and found[0].finish_reason == "stop"
                assert decode_text(tokenizer, found[0].token_ids) == wanted
                assert len(found[0].logprobs or []) == len(found[0].token_ids)


def test_an_end_that_is_both_is_the_token_that_comes_first() -> None:
    look = stop_strings(Letters(), ["bc"])
    assert ended([0, 1, 2, 3], 9, (3,), look) == ([0, 1, 2], "stop")
    assert ended([0, 1, 2, 3], 9, (1,), look) == ([0, 1], "eos")
    assert ended([0, 1, 2, 3], 9, (2,), look) == ([0, 1, 2], "eos")
    assert ended([0, 1, 2, 3], 3, (), look) == ([0, 1, 2], "stop")
    assert ended([0, 1, 2, 3], 2, (), look) == ([0, 1], "length")


def test_stops_that_cannot_be_are_refused(planted) -> None:
    with pytest.raises(ConfigError, match="an empty text would end every output"):
        begin(planted, stop=["a", ""])
    verifier, _ = planted
    folder, verifier.folder = verifier.folder, None
    try:
        with pytest.raises(ConfigError, match="no tokenizer"):
            stream(verifier, None, [[5]], num_speculative_tokens=0, stop="x")
    finally:
        verifier.folder = folder


def test_settings_for_another_number_of_prompts_are_refused(planted) -> None:
    with pytest.raises(ConfigError, match="settings for 2 prompts; there are 3"):
        begin(planted, sampling=[Sampling(), Sampling()])


def test_settings_of_each_prompt(planted) -> None:
    mixed = begin(planted, sampling=[Sampling(), Sampling(1.0, seed=4), Sampling(frequency_penalty=1.5)], batch_size=3)
    for _ in mixed:
        pass
    verifier, draft = planted
    for prompt, ids, one in zip(
        GIVEN, mixed.result().token_ids, ({}, {"temperature": 1.0, "seed": 4}, {"frequency_penalty": 1.5}), strict=True
    ):
        alone = sb.generate(verifier, draft, [prompt], num_speculative_tokens=0, max_new_tokens=24, ignore_eos=True, **one)
        assert alone.token_ids == [ids]
