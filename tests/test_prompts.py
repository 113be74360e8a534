"""Prompt files are read whole or refused with the line that is wrong."""
import collections
import dataclasses
import json

import pytest

from specbench.bench.prompts import Prompt, as_prompts, limit_per_category, load_prompts, prompt_set_hash
from specbench.errors import DataError

GOOD = {"question_id": 7, "category": "math", "turns": ["What is 6 times 7?", "And plus 1?"]}


def write(folder, *lines):
    path = folder / "question.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def test_shipped_set():
    prompts = load_prompts()
    assert prompts == load_prompts("specbench")
    assert len(prompts) == 64
    assert set(collections.Counter(p.category for p in prompts).values()) == {8}
    assert all(isinstance(p.turns, tuple) for p in prompts)


def test_peer_file_with_more_keys_blank_lines_and_no_last_newline(tmp_path):
    path = write(tmp_path, b"\xef\xbb\xbf" + json.dumps(GOOD | {"reference": ["42", "43"]}).encode(), b"", {**GOOD, "question_id": 8})
    assert load_prompts(path) == [Prompt(7, "math", tuple(GOOD["turns"])), Prompt(8, "math", tuple(GOOD["turns"]))]
    assert load_prompts(str(path)) == load_prompts(path)


def test_line_separators_inside_texts_do_not_split_lines(tmp_path):
    text = "one\u2028two\x85three\x1cfour"
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(GOOD | {"turns": [text]}, ensure_ascii=False) + "\n", encoding="utf-8", newline="")
    assert load_prompts(path)[0].turns == (text,)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (["a"], "list"),
        ({"category": "math", "turns": ["x"]}, "question_id"),
        (GOOD | {"question_id": "7"}, "'7'"),
        (GOOD | {"question_id": True}, "True"),
        (GOOD | {"category": " "}, "category"),
        (GOOD | {"turns": []}, "turns"),
        (GOOD | {"turns": "text"}, "turns"),
        (GOOD | {"turns": ["ok", ""]}, "turns"),
        (GOOD | {"turns": ["\ud800"]}, "surrogate"),
        (GOOD, "already used on line 1"),
    ],
)
def test_bad_line_is_refused_with_its_number(tmp_path, line, says):
    path = write(tmp_path, GOOD, b"", line)
    with pytest.raises(DataError, match="line 3") as caught:
        load_prompts(path)
    assert says in str(caught.value) and str(path) in str(caught.value)


def test_empty_file_and_missing_file(tmp_path):
    with pytest.raises(DataError, match="no prompt"):
        load_prompts(write(tmp_path, b""))
    with pytest.raises(FileNotFoundError, match="specbench"):
        load_prompts(tmp_path / "nothing.jsonl")


def test_hash_follows_content_not_spelling(tmp_path):
    path = write(tmp_path, GOOD)
    first = prompt_set_hash(load_prompts(path))
    path.write_text(json.dumps(dict(reversed(GOOD.items())), indent=None, separators=(" , ", " :  ")), encoding="utf-8")
    assert prompt_set_hash(load_prompts(path)) == first
    prompt = load_prompts(path)[0]
    others = [dataclasses.replace(prompt, **change) for change in ({"question_id": 8}, {"category": "stem"}, {"turns": prompt.turns[:1]})]
    assert len({first, *(prompt_set_hash([other]) for other in others)}) == 4
    assert prompt_set_hash([prompt, others[0]]) != prompt_set_hash([others[0], prompt])


def test_limit_keeps_balance_and_order():
    prompts = load_prompts()
    few = limit_per_category(prompts, 2)
    assert set(collections.Counter(p.category for p in few).values()) == {2} and len(few) == 16
    assert few == [p for p in prompts if p in few]
    assert limit_per_category(prompts, 100) == prompts
    with pytest.raises(DataError):
        limit_per_category(prompts, 0)


def test_what_callers_may_give():
    assert as_prompts(None) == load_prompts()
    assert as_prompts(["a", "b"]) == [Prompt(1, "custom", ("a",)), Prompt(2, "custom", ("b",))]
    assert as_prompts([Prompt(3, "x", ("y",))]) == [Prompt(3, "x", ("y",))]
    for bad in ([], ["a", Prompt(3, "x", ("y",))], [[1, 2]], [Prompt(3, "x", ("y",))] * 2):
        with pytest.raises(DataError):
            as_prompts(bad)
