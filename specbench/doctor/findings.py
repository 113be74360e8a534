"""What the doctor says: findings, and the report that holds them.

What enters: facts that checks found. What leaves: frozen records that turn into a table, text, HTML or JSON. It does not know how anything
is checked; words that are the same for every pair with one fault come from `pages`. The JSON is described by schema.json beside this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bench.atomic import write_json
from ..errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

SEVERITIES = ("info", "warning", "error")
SCHEMA_VERSION = 1
FAILURES = ("KeyError", "shape error", "refused", "silent")  # outcomes after which there is no useful draft
LONGEST = 160  # characters of a value


@dataclass(frozen=True, slots=True)
class Evidence:
    """One value and the place it was read from: a file ("draft config.json", "verifier model.safetensors") and a key or tensor in it."""

    file: str
    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.file}: {self.key} = {self.value}" if self.key else f"{self.file} = {self.value}"


@dataclass(frozen=True, slots=True)
class Affected:
    """One engine release that a finding concerns.

    engine: "vLLM 0.11.0". policy: its row of `POLICIES`. outcome: "KeyError", "shape error", "refused", "silent", "ignored". sees: what its
    user sees. why: the evidence for that behaviour.
    """

    engine: str
    policy: str
    outcome: str
    sees: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that the doctor noticed.

    code: stable name, a page of `pages`. severity: "error" (the pair does not work, or gives wrong results, as its files are), "warning"
    (it may cost acceptance, or work in some engines only), "info". sentence: what is the case. sees: what a user notices. fix: flag,
    release or file edit.
    """

    code: str
    severity: str
    sentence: str
    evidence: tuple[Evidence, ...] = ()
    affected: tuple[Affected, ...] = ()
    sees: str = ""
    fix: str = ""

    @property
    def rank(self) -> int:
        return SEVERITIES.index(self.severity)


@dataclass(frozen=True, slots=True)
class Report:
    """All findings about one pair, the worst first; shows itself in a notebook, `print` gives text.

    verifier, draft: {"name", "revision", "quantization"}, the draft's also with "family"; what is not known is None. engine: the only
    policy that was asked about, or None. readable: False where the files of one side could not be read, so that not all was checked.
    """

    verifier: Mapping[str, str | None]
    draft: Mapping[str, str | None]
    findings: tuple[Finding, ...]
    engine: str | None = None
    readable: bool = True
    version: str = field(default="", repr=False)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __contains__(self, code: object) -> bool:
        return any(finding.code == code for finding in self.findings)

    def __getitem__(self, code: str) -> Finding:
        """The finding of a code.

        Raises:
            KeyError: there is none.
        """
        found = next((finding for finding in self.findings if finding.code == code), None)
        if found is None:
            raise KeyError(code)
        return found

    @property
    def codes(self) -> tuple[str, ...]:
        """Codes of all findings, the worst first."""
        return tuple(finding.code for finding in self.findings)

    @property
    def worst(self) -> str | None:
        """The highest severity, None without findings."""
        return self.findings[0].severity if self.findings else None

    def at_least(self, severity: str) -> tuple[Finding, ...]:
        """Findings of this severity or a higher one.

        Raises:
            ConfigError: no severity is called so.
        """
        if severity not in SEVERITIES:
            raise ConfigError(f"{severity!r} is no severity; {', '.join(SEVERITIES)} are")
        return tuple(finding for finding in self.findings if finding.rank >= SEVERITIES.index(severity))

    def exit_code(self, fail_on: str = "error") -> int:
        """0: no finding at or above `fail_on`. 1: there is one. 2: files could not be read."""
        found = self.at_least(fail_on)
        return 2 if not self.readable else int(bool(found))

    def to_frame(self) -> pd.DataFrame:
        """One row per finding: severity | code | finding | affected | fix."""
        import pandas as pd

        rows = [(f.severity, f.code, f.sentence, ", ".join(a.engine for a in f.affected), f.fix) for f in self.findings]
        return pd.DataFrame(rows, columns=["severity", "code", "finding", "affected", "fix"])

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it (schema.json)."""
        return {
            "schema_version": SCHEMA_VERSION, "specbench": self.version, "verifier": dict(self.verifier), "draft": dict(self.draft),
            "engine": self.engine, "readable": self.readable, "findings": [asdict(finding) for finding in self.findings],
        }  # fmt: skip

    def save(self, path: Path) -> None:
        """Write the JSON, whole or not at all."""
        write_json(path, self.to_dict())

    def __str__(self) -> str:
        from .show import report_text

        return report_text(self)

    def _repr_html_(self) -> str:
        from .show import report_html

        return report_html(self)


def ordered(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The worst first; of one severity those with which a load fails first, otherwise as they were found."""
    return tuple(sorted(findings, key=lambda f: (-f.rank, not any(a.outcome in FAILURES for a in f.affected))))


def shown(value: Any) -> str:
    """A value as evidence shows it: short, on one line, without control characters."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def evidence_of(places: Mapping[str, Any]) -> tuple[Evidence, ...]:
    """Evidence from {"draft config.json: hidden_size": 32}."""
    found = []
    for place, value in places.items():
        file, _, key = place.partition(": ")
        found.append(Evidence(shown(file), shown(key), shown(value)))
    return tuple(found)
