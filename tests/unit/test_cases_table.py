"""docs/cases.md answers every case and lists the tests that say that they show one, and no others."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.support.cases import case_ids

ROOT = Path(__file__).parents[2]
LAST = 125
NEVER_GIVEN = {8, 13, 21, 29, 30, 34, 43, 50, 55, 63, 71, 74, 76, 80, 84, 92, 97, 105, 111, 118}
IDS = [f"I{number:02}" for number in range(1, LAST + 1) if number not in NEVER_GIVEN]

Row = tuple[str, str, str, list[str]]  # id, fault, outcome, tests


def table() -> list[Row]:
    """The rows of all tables."""
    found = []
    for line in (ROOT / "docs" / "cases.md").read_text("utf-8").splitlines():
        if re.match(r"\| I\d", line):
            ident, fault, outcome, tests = (cell.strip() for cell in line.strip("|").split(" | "))
            found.append((ident, fault, outcome, re.findall(r"`(tests/[^`]+::[^`]+)`", tests)))
    return found


def named_tests() -> dict[str, list[str]]:
    """Every test of the project, and the cases that its name and docstring name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                name = f"{path.relative_to(ROOT)}::{node.name}"
                found[name] += case_ids(node.name, ast.get_docstring(node))
    return found


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return table()


@pytest.fixture(scope="module")
def tests() -> dict[str, list[str]]:
    return named_tests()


def test_every_case_is_answered_once(rows: list[Row]) -> None:
    counts = Counter(ident for ident, *_ in rows)
    assert sorted(set(IDS) - counts.keys()) == [], "a case has no row"
    assert sorted(counts.keys() - set(IDS)) == [], "there is no such case"
    assert [ident for ident, count in counts.items() if count > 1] == []
    assert [ident for ident, *_ in rows] == sorted(counts, key=lambda ident: int(ident[1:]))


def test_each_row_says_what_happens_and_how_that_is_known(rows: list[Row]) -> None:
    for ident, fault, outcome, listed in rows:
        assert len(fault) > 15, ident
        assert len(outcome) > 8, ident
        assert listed or "**Open" in outcome or "cannot" in outcome, f"{ident}: no test, and no reason why"


def test_listed_tests_exist_and_say_which_case_they_show(
    rows: list[Row], tests: dict[str, list[str]]
) -> None:
    for ident, _, _, listed in rows:
        assert [name for name in listed if name not in tests] == [], f"{ident}: no such test"
        silent = [name for name in listed if ident not in tests[name]]
        assert silent == [], f"{ident}: say so in the docstring"
        assert len(set(listed)) == len(listed), ident


def test_tests_that_name_a_case_are_listed(rows: list[Row], tests: dict[str, list[str]]) -> None:
    listed = {ident: set(names) for ident, _, _, names in rows}
    missing = [
        f"{ident}: {name}"
        for name, idents in tests.items()
        for ident in idents
        if name not in listed.get(ident, ())
    ]
    assert missing == [], "add them to docs/cases.md"


def test_ids_are_told_from_other_words() -> None:
    assert case_ids("test_I07_I125_and_I5", "I31, I32: (I33). RI44 xI45 I4 I1234 invariant I10") == [
        *("I07", "I125", "I31", "I32", "I33")
    ]
    assert case_ids("test_plain", None) == []
