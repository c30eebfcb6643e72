"""docs/reasons.md lists exactly the registered reason codes, with the same titles."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

from gnnaccel.dispatch.policy.reasons import KINDS, reason

DOC = Path(__file__).resolve().parents[1] / "docs" / "reasons.md"


def rows() -> list[list[str]]:
    """The cells of the table's rows: code, title, meaning, what to do."""
    lines = [line for line in DOC.read_text(encoding="utf-8").splitlines()
             if line.startswith("| GA")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_document_lists_every_code_once_in_order():
    assert [row[0] for row in rows()] == sorted(KINDS)


def test_titles_are_the_registered_ones():
    assert {row[0]: row[1] for row in rows()} == {code: kind.title for code, kind in KINDS.items()}


def test_every_row_says_what_it_means_and_what_to_do():
    for row in rows():
        assert len(row) == 4 and all(row), row


def test_codes_belong_to_a_documented_group():
    groups = set(re.findall(r"^- (GA\d)xx:", DOC.read_text(encoding="utf-8"), re.MULTILINE))
    assert {code[:3] for code in KINDS} <= groups


def test_reason_takes_title_and_hint_from_the_registry():
    plain = reason("GA402")
    assert (plain.text, plain.hint) == (KINDS["GA402"].title, KINDS["GA402"].hint)
    assert str(reason("GA402", "no cupy")) == "GA402 no cupy"
    with pytest.raises(KeyError):
        reason("GA000")


def test_the_guide_says_what_to_do_about_every_code():
    guide = (Path(__file__).parents[1] / "docs" / "guide.md").read_text(encoding="utf-8")
    named: list[str] = []
    for cell in re.findall(r"^\| (GA[^|]*) \|", guide, re.M):
        for first, last in re.findall(r"GA(\d\w\w)(?: to GA(\d\d\d))?", cell):
            low, high = (first.replace("x", digit) for digit in "09")
            named += [f"GA{code}" for code in range(int(low), int(last or high) + 1)]
    assert len(named) == len(set(named)) and set(KINDS) <= set(named)
