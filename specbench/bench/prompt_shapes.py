"""The shapes in which prompt files circulate, and what is known of the licence of the sets that made each shape known.

What enters: one decoded line of a file. What leaves: a question id, a category and turns. It does not know files or hubs.

    questions   question_id, category, turns                   EAGLE, Spec-Bench, FastChat's MT-Bench
    mt_bench    prompt_id, category, prompt (a list)            MT-Bench on the hub
    humaneval   task_id, prompt, entry_point                   the prompt is asked as it stands: a signature with its docstring
    gsm8k       question, answer
    messages    messages: [{role, content}]                    system messages are refused; answers of an assistant are not read
    text        one of prompt, text, instruction, input, query any other jsonl; `category` is read where there is one
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import DataError

NOT_STATED = "not stated"
TEXT_KEYS = ("prompt", "text", "instruction", "input", "query")
Fields = tuple[Any, Any, Any]  # question id, category, turns, unchecked


@dataclass(frozen=True, slots=True)
class Shape:
    """keys: those that tell it. read: a line and its number in the file -> fields. licence: of the set that the shape is known from."""

    name: str
    keys: tuple[str, ...]
    read: Callable[[Mapping[str, Any], int], Fields]
    licence: str = NOT_STATED


def _number_in(text: Any, line: int) -> int:
    digits = re.search(r"(\d+)$", str(text))
    return int(digits[1]) if digits else line


def _messages(row: Mapping[str, Any], line: int) -> Fields:
    found = row["messages"]
    if not isinstance(found, list) or not all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in found):
        raise DataError(f"messages is {found!r}; expected a list of objects with role and content")
    roles = {m["role"] for m in found}
    if not roles <= {"user", "assistant"}:
        raise DataError(f"messages have the roles {sorted(roles)}; only user turns are asked, so a system message would be lost")
    return line, row.get("category", "custom"), [m["content"] for m in found if m["role"] == "user"]


def _text(row: Mapping[str, Any], line: int) -> Fields:
    key = next(key for key in TEXT_KEYS if key in row)
    if key == "instruction" and row.get("input"):  # Alpaca: the instruction and what it is about
        return line, row.get("category", "custom"), [f"{row['instruction']}\n\n{row['input']}"]
    return line, row.get("category", "custom"), [row[key]]


SHAPES = (
    Shape("questions", ("question_id", "category", "turns"), lambda row, _: (row["question_id"], row["category"], row["turns"])),
    Shape("mt_bench", ("prompt_id", "category", "prompt"), lambda row, _: (row["prompt_id"], row["category"], row["prompt"]), "Apache-2.0"),
    Shape("humaneval", ("task_id", "prompt", "entry_point"), lambda r, n: (_number_in(r["task_id"], n), "humaneval", [r["prompt"]]), "MIT"),
    Shape("gsm8k", ("question", "answer"), lambda row, line: (line, "gsm8k", [row["question"]]), "MIT"),
    Shape("messages", ("messages",), _messages),
)
TEXT = Shape("text", (), _text)

# Seen on the card or in the repository of each set; what a set was made from may have terms of its own.
LICENCES = {
    "specbench": "CC0-1.0",
    "HuggingFaceH4/mt_bench_prompts": "Apache-2.0",
    "openai/openai_humaneval": "MIT",
    "openai/gsm8k": "MIT",
    "tatsu-lab/alpaca": "CC-BY-NC-4.0",
    "RedHatAI/speculator_benchmarks": "Apache-2.0 (its HumanEval part MIT)",
    "nvidia/SPEED-Bench": "NVIDIA Evaluation Dataset License",
}
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPEC_BENCH = ("translation", "summarization", "qa", "math_reasoning", "rag")


def shape_of(row: Mapping[str, Any]) -> Shape:
    """The shape that the keys of a line tell.

    Raises:
        DataError: none of them.
    """
    for shape in SHAPES:
        if set(shape.keys) <= set(row):
            return shape
    if any(key in row for key in TEXT_KEYS) and "question_id" not in row:
        return TEXT
    known = "; ".join(f"{shape.name}: {', '.join(shape.keys)}" for shape in SHAPES)
    raise DataError(f"it has the keys {sorted(row)}; expected those of one shape ({known}; text: one of {', '.join(TEXT_KEYS)})")


def licence_of(shape: Shape, categories: Sequence[str], ids: Sequence[int]) -> str:
    """What is known of the licence of a file of this shape. It is that of the set that the file looks like: the file itself says none."""
    if shape.name == "questions":
        if set(categories) & set(SPEC_BENCH):
            return "Apache-2.0, if it is Spec-Bench as its categories suggest; its sources have terms of their own"
        if set(categories) <= set(MT_BENCH) and all(81 <= i <= 160 for i in ids):
            return "Apache-2.0, if it is MT-Bench as its ids suggest"
    elif shape.licence != NOT_STATED:
        return f"{shape.licence}, if it is {shape.name} as its shape suggests"
    return NOT_STATED
