"""Prompt files are read whole or refused with the line that is wrong."""

import collections
import dataclasses
import gzip
import json
from importlib.util import find_spec

import pandas as pd
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


def test_the_shapes_that_circulate(tmp_path):
    human = {"task_id": "HumanEval/12", "prompt": "def f():", "entry_point": "f", "test": "", "canonical_solution": ""}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}]
    shapes = {
        "mt": ({"prompt_id": 81, "category": "stem", "prompt": ["a", "b"]}, Prompt(81, "stem", ("a", "b")), "Apache-2.0, if"),
        "he": (human, Prompt(12, "humaneval", ("def f():",)), "MIT, if it is humaneval"),
        "gsm": ({"question": "1+1?", "answer": "#### 2"}, Prompt(1, "gsm8k", ("1+1?",)), "MIT, if it is gsm8k"),
        "chat_mt": (GOOD | {"question_id": 160}, Prompt(160, "math", tuple(GOOD["turns"])), "Apache-2.0, if it is MT-Bench"),
        "specb": ({"question_id": 9, "category": "rag", "turns": ["x"]}, Prompt(9, "rag", ("x",)), "Apache-2.0, if it is Spec-Bench"),
        "mine": ({"question_id": 9, "category": "stem", "turns": ["x"]}, Prompt(9, "stem", ("x",)), "not stated"),
        "chat": ({"messages": turns}, Prompt(1, "custom", ("x", "z")), "not stated"),
        "text": ({"text": "x", "category": "c"}, Prompt(1, "c", ("x",)), "not stated"),
        "alpaca": ({"instruction": "Sum up", "input": "this", "output": ""}, Prompt(1, "custom", ("Sum up\n\nthis",)), "not stated"),
    }  # fmt: skip
    for name, (row, prompt, licence) in shapes.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps(row))
        found = load_prompts(path)
        assert list(found) == [prompt] and found.licence.startswith(licence) and found.name == name
    assert load_prompts(path, licence="mine").licence == "mine"


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"question": "q", "answer": "a"}, {"text": "x"}], "line 2: its keys .* are those of text, and all before it are of gsm8k"),
        ([{"foo": 1}], r"line 1: it has the keys \['foo'\]; expected those of one shape \(questions: question_id"),
        ([{"messages": [{"role": "system", "content": "be brief"}]}], r"roles \['system'\]"),
        ([{"messages": [{"role": "assistant", "content": "y"}]}], r"turns is \[\]"),
        ([{"messages": "hello"}], "messages is 'hello'"),
        ([{"prompt": 3}], r"turns is \[3\]"),
    ],
)
def test_a_line_of_no_shape_or_of_another(tmp_path, rows, says):
    with pytest.raises(DataError, match=says):
        load_prompts(write(tmp_path, *rows))


def test_other_containers(tmp_path):
    rows = [{"question": "q1", "answer": ""}, {"question": "q2", "answer": ""}]
    expected = [Prompt(1, "gsm8k", ("q1",)), Prompt(2, "gsm8k", ("q2",))]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"\n".join(json.dumps(row).encode() for row in rows)))
    pd.DataFrame(rows).to_parquet(tmp_path / "c.parquet")
    for name in ("a.json", "b.jsonl.gz", "c.parquet"):
        assert list(load_prompts(tmp_path / name)) == expected and load_prompts(tmp_path / name).name == name[0]
    (tmp_path / "d.json").write_text("{}")
    with pytest.raises(DataError, match="a dict; expected a list"):
        load_prompts(tmp_path / "d.json")


def test_a_set_knows_its_licence_through_slices_and_limits():
    prompts = load_prompts()
    for part in (prompts, prompts[:3], limit_per_category(prompts, 1), as_prompts(prompts)):
        assert (part.name, part.licence, part.source) == ("specbench", "CC0-1.0", "shipped with specbench")
    assert prompts[0] == list(prompts)[0]
    assert repr(prompts).startswith("64 prompts of specbench in 8 categories; licence: CC0-1.0; sha256 ")
    own = as_prompts(["x"])
    assert (own.name, own.licence) == ("", "not stated")
    assert own.describe() == {"name": "", "source": "given by the caller", "licence": "not stated", "sha256": prompt_set_hash(own),
                              "num_prompts": 1, "categories": {"custom": 1}}  # fmt: skip


def test_a_data_set_of_the_hub_says_what_it_needs(monkeypatch):
    monkeypatch.setattr("specbench.bench.prompts.find_spec", lambda _: None)
    with pytest.raises(DataError, match=r"hub:openai/gsm8k needs the package datasets.*pip install 'specbench\[datasets\]'"):
        load_prompts("hub:openai/gsm8k")


@pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed (pip install 'specbench[datasets]')")
def test_a_data_set_in_the_hubs_layout(tmp_path, monkeypatch):
    """A folder takes the place of the hub id: the same library calls, without network."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    for split in ("train", "test"):
        (tmp_path / "set" / f"{split}.jsonl").write_text(json.dumps({"question": f"{split}?", "answer": "1"}) + "\n")
    with pytest.raises(DataError, match="has the splits test, train; say which: .*:default:|has the splits train, test; say which"):
        load_prompts(f"hub:{tmp_path / 'set'}")
    found = load_prompts(f"hub:{tmp_path / 'set'}::test")
    assert list(found) == [Prompt(1, "gsm8k", ("test?",))] and found.licence.startswith("MIT, if")
    (tmp_path / "set" / "train.jsonl").unlink()
    assert len(load_prompts(f"hub:{tmp_path / 'set'}")) == 1, "the only split needs no name"


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
