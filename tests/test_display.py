"""Coloured text: every token from its source, nothing lost, nothing injected."""

from __future__ import annotations

import html
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.decode.request import Generation, Timing
from specbench.display import accepted_text, origins
from specbench.errors import ConfigError


class Bytes:
    """A tokenizer with one id per byte."""

    def decode(self, ids: list[int], clean_up_tokenization_spaces: bool) -> str:
        return bytes(ids).decode(errors="replace")


def generation(text: str, accepted: list[int]) -> Generation:
    return Generation([1], list(text.encode()), accepted, [3] * len(accepted), "length", Timing())


def coloured(text: str, accepted: list[int]) -> str:
    source = accepted_text(generation(text, accepted), Bytes())._repr_html_()
    return source.partition("<div")[2].partition("</div>")[0].partition(">")[2]


def test_drafted_tokens_are_marked_with_round_and_position() -> None:
    body = coloured("abcdef", [2, 1])  # a: prompt pass; bc drafted, d own; e drafted, f own
    marked = re.findall(r'title="(round \d+, draft position \d+)">(.)</span>', body)
    assert marked == [("round 1, draft position 1", "b"), ("round 1, draft position 2", "c"), ("round 2, draft position 1", "e")]
    assert re.sub(r"<[^>]+>", "", body) == "abcdef"


def test_text_is_escaped() -> None:
    text = "<script>&\"'"
    body = coloured(text, [3, 5])
    assert "<script" not in body
    assert html.unescape(re.sub(r"<[^>]+>", "", body)) == text


def test_half_characters_are_shown_whole() -> None:
    assert re.sub(r"<[^>]+>", "", coloured("aé€b", [3, 2])) == "aé€b"


def test_a_last_round_may_end_with_a_draft_token() -> None:
    assert [origin.draft_position for origin in origins([1, 2], 5)] == [None, 1, None, 1, 2]


@pytest.mark.parametrize(("accepted", "num_tokens"), [([1, 2], 4), ([1, 2], 7), ([], 0), ([], 2)])
def test_counts_that_do_not_add_up_are_refused(accepted: list[int], num_tokens: int) -> None:
    with pytest.raises(ConfigError, match="do not fit accepted counts"):
        origins(accepted, num_tokens)


@given(st.lists(st.integers(0, 5), max_size=20))
def test_origins_repeat_the_counts(accepted: list[int]) -> None:
    found = origins(accepted, 1 + sum(accepted) + len(accepted))
    drafted = [origin.round for origin in found if origin.draft_position is not None]
    assert [drafted.count(index) for index in range(len(accepted))] == accepted
