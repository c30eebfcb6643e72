"""`Finding`: what one check of the doctor came to; and findings for a reader: a table on a
terminal, plain lines elsewhere, and a block to paste into a bug report."""
from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass

STATUSES = ("ok", "note", "warn", "fail")
_MARKS = {"ok": "ok  ", "note": "    ", "warn": "WARN", "fail": "FAIL"}
_STYLES = {"ok": "green", "note": "dim", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Finding:
    """``status``: "ok"; "note", worth knowing, nothing to fix; "warn", works, but not as it
    could; "fail". The last two have a ``remedy``."""

    group: str
    name: str
    status: str
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status={self.status!r} is none of {', '.join(STATUSES)}")
        if self.status in ("warn", "fail") and not self.remedy:
            raise ValueError(f"{self.name}: a finding that is {self.status} needs a remedy")

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def lines(findings: Iterable[Finding]) -> list[str]:
    """One line per finding, and below it what to do."""
    found, group = [], None
    for finding in findings:
        if finding.group != group:
            group = finding.group
            found.append(f"{group}:")
        found.append(f"  {_MARKS[finding.status]} {finding.name}: {finding.text}")
        if finding.remedy:
            found.append(f"         -> {finding.remedy}")
    return found


def verdict(findings: list[Finding]) -> str:
    counts = {status: sum(finding.status == status for finding in findings) for status in STATUSES}
    if counts["fail"]:
        return f"{counts['fail']} failed, {counts['warn']} warnings: see the remedies above"
    return f"no failure, {counts['warn']} warnings" if counts["warn"] else "everything is in order"


def block(findings: list[Finding]) -> str:
    """What to paste into a bug report: everything, in plain text, fenced."""
    return "\n".join(["```", "python -m gnnaccel doctor", *lines(findings), verdict(findings),
                      "```"])


def show(findings: list[Finding]) -> None:
    if not (sys.stdout.isatty() and _table(findings)):
        print("\n".join(lines(findings)))
    print(f"\n{verdict(findings)}")
    if sys.stdout.isatty():  # elsewhere the whole output is plain already
        print(f"\nFor a bug report, paste this:\n\n{block(findings)}")


def _table(findings: list[Finding]) -> bool:
    """False where rich is missing."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table("", "", "", "", show_header=False, box=None, padding=(0, 1))
    group = None
    for finding in findings:
        text = Text(finding.text)
        if finding.remedy:
            text.append(f"\n-> {finding.remedy}", style="bold")
        table.add_row(finding.group if finding.group != group else "", finding.name,
                      Text(finding.status, style=_STYLES[finding.status]), text)
        group = finding.group
    Console().print(table)
    return True
