"""Training prompts from many forms and large tables, filled at random; `varied.txt` holds both.

What enters: a seed and a count. What leaves: distinct `{"category": str, "prompt": str}`, the same for the same seed. It does not know
the verifier or its answers; `invent.admitted` keeps them clear of the evaluation prompts.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

from invent import admitted, evaluation_prompts

SOURCE = Path(__file__).parent / "varied.txt"


def read_forms() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """(forms of each category, entries of each table)."""
    forms: dict[str, list[str]] = {}
    tables: dict[str, list[str]] = {}
    for line in SOURCE.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        name, text = line.removeprefix("= ").split(": ", 1)
        if line.startswith("= "):
            tables[name] = text.split("|")
        else:
            forms.setdefault(name, []).append(text.replace("\\n", "\n"))
    return forms, tables


def _number(kind: str, rng: random.Random) -> str | None:
    if kind == "clock":
        return f"{rng.randint(6, 21)}:{rng.randrange(0, 60, 5):02}"
    ranges = {"small": (2, 9), "int": (10, 60), "percent": (5, 95), "hundred": (80, 900)}
    return str(rng.randint(*ranges[kind])) if kind in ranges else None


def fill(form: str, tables: dict[str, list[str]], rng: random.Random) -> str:
    """`form` with every slot filled; a slot that occurs twice gets two entries, and `{x_cap}` begins a sentence."""
    used: set[str] = set()

    def entry(match: re.Match[str]) -> str:
        slot = match[1]
        kind = slot.removesuffix("_cap")
        found = _number(kind, rng)
        if found is None:
            found = rng.choice([x for x in tables[kind] if x not in used])
            used.add(found)
        return found[0].upper() + found[1:] if slot != kind else found

    while "{" in form:  # a passage holds slots itself
        form = re.sub(r"\{(\w+)\}", entry, form)
    return re.sub(r"\b([Aa]) (?=[aeiouAEIOU])", r"\1n ", form)


def varied_prompts(count: int, seed: int = 0) -> list[dict[str, str]]:
    """About `count` prompts, equally many of each category in turn."""
    rng = random.Random(seed)
    forms, tables = read_forms()
    decks: dict[str, list[str]] = {name: [] for name in forms}
    rows = []
    for i in range(count):
        category = list(forms)[i % len(forms)]
        if not decks[category]:
            decks[category] = rng.sample(forms[category], len(forms[category]))
        rows.append({"category": category, "prompt": fill(decks[category].pop(), tables, rng)})
    return admitted(rows, evaluation_prompts())
