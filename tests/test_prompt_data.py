"""The evaluation prompts have the promised shape and do not meet the training prompts."""
import collections
import importlib.util
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
CATEGORIES = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
SHINGLE = 8


def _load_training_prompts():
    spec = importlib.util.spec_from_file_location("recipe_prompts", ROOT / "data" / "recipe" / "prompts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.training_prompts


training_prompts = _load_training_prompts()
TRAINING = training_prompts()
LINES = (ROOT / "data" / "prompts" / "specbench.jsonl").read_text(encoding="utf-8").splitlines()
ROWS = [json.loads(line) for line in LINES]
EVAL = [turn for row in ROWS for turn in row["turns"]]


def _fold(text):
    return " ".join(text.lower().split())


def _shingles(text):
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i:i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)}


def test_counts_and_ids():
    assert len(ROWS) == 64
    assert collections.Counter(row["category"] for row in ROWS) == {name: 8 for name in CATEGORIES}
    assert len({row["question_id"] for row in ROWS}) == 64
    assert len({_fold(prompt) for prompt in EVAL}) == 64


def test_shape():
    for row in ROWS:
        assert set(row) == {"question_id", "category", "turns"}
        assert isinstance(row["question_id"], int)
        assert isinstance(row["turns"], list) and len(row["turns"]) == 1
        assert isinstance(row["turns"][0], str) and row["turns"][0].strip() == row["turns"][0] != ""


def test_training_prompts_are_many_distinct_and_deterministic():
    assert len(TRAINING) >= 14_000
    assert len({row["prompt"] for row in TRAINING}) == len(TRAINING)
    assert {row["category"] for row in TRAINING} == CATEGORIES
    assert all(5 <= len(row["prompt"].split()) <= 120 for row in TRAINING)
    assert training_prompts() == TRAINING


def test_no_eval_prompt_is_a_training_prompt():
    exact = {row["prompt"] for row in TRAINING}
    folded = {_fold(prompt) for prompt in exact}
    assert not [prompt for prompt in EVAL if prompt in exact or _fold(prompt) in folded]


def test_no_shared_shingle():
    held_out = set().union(*(_shingles(prompt) for prompt in EVAL))
    shared = {s for row in TRAINING for s in _shingles(row["prompt"]) & held_out}
    assert not shared
