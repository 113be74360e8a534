"""What is known about each code: how bad it is, what a user sees, what to do, where it comes from. The words lie in pages.toml.

What enters: a code. What leaves: its `Page`. It does not know any pair.
"""

from __future__ import annotations

import difflib
import textwrap
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..errors import ConfigError

FILE = Path(__file__).with_name("pages.toml")


@dataclass(frozen=True, slots=True)
class Page:
    """One code. severity: of a finding that says nothing else. references: issues, pull requests, files of engines."""

    code: str
    severity: str
    title: str
    sees: str
    fix: str
    cause: str
    history: str
    references: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"{self.code} ({self.severity}): {self.title}"]
        for name in ("cause", "sees", "fix", "history"):
            text = getattr(self, name)
            if text:
                head = {"sees": "what you see"}.get(name, name)
                parts += ["", *textwrap.wrap(f"{head}: {text}", 100, subsequent_indent="  ", break_long_words=False)]
        if self.references:
            parts += ["", "references:", *(f"  {reference}" for reference in self.references)]
        return "\n".join(parts)


@cache
def pages() -> dict[str, Page]:
    """All pages by code."""
    with FILE.open("rb") as file:
        entries = tomllib.load(file)
    return {
        code: Page(
            code, entry["severity"], entry["title"], entry.get("sees", ""), entry["fix"], entry["cause"], entry.get("history", ""),
            tuple(entry.get("references", ())),
        )
        for code, entry in entries.items()
    }  # fmt: skip


def explain(code: str) -> Page:
    """The page of a code: cause, history, references.

    Raises:
        ConfigError: no such code; the message has the nearest ones.
    """
    known = pages()
    if code not in known:
        near = difflib.get_close_matches(code, known, n=3)
        raise ConfigError(f"no finding has the code {code!r}; {'nearest: ' + ', '.join(near) if near else 'known: ' + ', '.join(known)}")
    return known[code]
