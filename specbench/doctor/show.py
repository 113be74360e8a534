"""A report as text for a terminal and as HTML for a notebook.

What enters: a report. What leaves: text. It decides nothing, and escapes what files said.
"""

from __future__ import annotations

import html
import shutil
import textwrap

from .findings import FAILURES, Affected, Finding, Report

COLOURS = {"error": "#D55E00", "warning": "#B8860B", "info": "#0072B2"}
NARROWEST, WIDEST = 60, 140  # characters


def report_text(report: Report, width: int | None = None, details: bool = True) -> str:
    """A head, a table of the findings, and for each what speaks for it, who is affected and what to do.

    Args:
        width: characters of a line; None asks the terminal.
        details: also what follows the table.
    """
    width = max(NARROWEST, min(WIDEST, width or shutil.get_terminal_size((100, 24)).columns))
    lines = [f"verifier  {_side(report.verifier)}", f"draft     {_side(report.draft)}"]
    if report.engine:
        lines.append(f"engine    {report.engine}")
    lines += ["", *_table(report.findings, width)]
    if details:
        for finding in report.findings:
            lines += ["", f"{finding.severity}: {finding.code}", *_details(finding, width)]
    return "\n".join([*lines, "", *_wrapped(failing(report), width, "  "), summary(report)])


def summary(report: Report) -> str:
    """One line: how many findings of each severity."""
    counts = {severity: sum(f.severity == severity for f in report.findings) for severity in ("error", "warning", "info")}
    said = ", ".join(f"{count} {severity}{'s' if count != 1 and severity != 'info' else ''}" for severity, count in counts.items() if count)
    if not report.readable:
        return f"could not read the pair: {said}"
    return f"{said}; `specbench doctor --explain CODE` says more about one" if said else "nothing found"


def failing(report: Report) -> str:
    """Which releases leave no useful draft, whatever the severity; "" where none does, or one was asked about."""
    names = dict.fromkeys(one.engine for finding in report.findings for one in finding.affected if one.outcome in FAILURES)
    return "" if report.engine or not names else f"fails in {', '.join(names)}; --engine asks about one"


def _side(side: object) -> str:
    facts: dict[str, str | None] = dict(side)  # type: ignore[call-overload]
    revision = facts.get("revision")
    words = [facts["name"], f"at {revision[:12]}" if revision else "", facts.get("family") or ""]
    quantization = facts.get("quantization")
    weights = {"none": "plain", None: ""}.get(quantization, quantization)
    return "  ".join(filter(None, [*words, f"weights: {weights}" if weights else ""]))


def _table(findings: tuple[Finding, ...], width: int) -> list[str]:
    code_width = max((len(finding.code) for finding in findings), default=0)
    indent = " " * (9 + code_width + 2)
    lines = []
    for finding in findings:
        head = f"{finding.severity:<9}{finding.code:<{code_width}}  "
        lines += _wrapped(head + finding.sentence, width, indent)
    return lines


def _details(finding: Finding, width: int) -> list[str]:
    lines = []
    for index, item in enumerate(finding.evidence):
        lines += _wrapped(f"  {'evidence' if index == 0 else '':<10}{item}", width, " " * 14)
    for index, (who, text) in enumerate(_grouped(finding.affected)):
        lines += _wrapped(f"  {'affected' if index == 0 else '':<10}{who}: {text}", width, " " * 14)
    if not finding.affected and finding.sees:
        lines += _wrapped(f"  {'sees':<10}{finding.sees}", width, " " * 14)
    return lines + _wrapped(f"  {'fix':<10}{finding.fix}", width, " " * 14)


def _grouped(affected: tuple[Affected, ...]) -> list[tuple[str, str]]:
    """Releases that see the same, on one line."""
    groups: dict[str, list[str]] = {}
    for one in affected:
        groups.setdefault(one.sees, []).append(one.engine)
    return [(", ".join(engines), text) for text, engines in groups.items()]


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, replace_whitespace=True)


def report_html(report: Report) -> str:
    """The same as a table whose rows open."""
    escape = html.escape
    head = "".join(
        f"<div><b>{name}</b> {escape(_side(side))}</div>" for name, side in (("verifier", report.verifier), ("draft", report.draft))
    )
    if report.engine:
        head += f"<div><b>engine</b> {escape(report.engine)}</div>"
    failures = f"<p>{escape(failing(report))}</p>" if failing(report) else ""
    rows = "".join(_row(finding) for finding in report.findings)
    return f'<div style="max-width:70em">{head}{rows}{failures}<p>{escape(summary(report))}</p></div>'


def _row(finding: Finding) -> str:
    escape = html.escape
    items = [f"<li>{escape(str(item))}</li>" for item in finding.evidence]
    items += [f"<li><b>{escape(who)}</b>: {escape(text)}</li>" for who, text in _grouped(finding.affected)]
    sees = f"<p>{escape(finding.sees)}</p>" if finding.sees and not finding.affected else ""
    label = f'<b style="color:{COLOURS[finding.severity]}">{finding.severity}</b> <code>{escape(finding.code)}</code>'
    body = f"{sees}<ul>{''.join(items)}</ul><p><b>Fix</b>: {escape(finding.fix)}</p>"
    return f"<details{' open' if finding.severity == 'error' else ''}><summary>{label} {escape(finding.sentence)}</summary>{body}</details>"
