"""The table of faults says so when a test fails, breaks before it begins, or does not run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.reliability import BEGIN, END, main, results, write_report


def report(
    name: str, outcome: str, when: str = "call", why: object = None, times: int = 1
) -> pytest.TestReport:
    said = ("reliability", ["Disk", f"fault of {name.split('[')[0]}", "how", "all is well", times])
    return pytest.TestReport(
        f"tests/x.py::{name}",
        ("", 0, ""),
        {},
        outcome,
        why,
        when,
        user_properties=[said],  # type: ignore[arg-type]
    )


def test_failures_and_skips_are_rows_of_the_table(tmp_path: Path) -> None:
    document = tmp_path / "reliability.md"
    document.write_text(f"by hand\n{BEGIN}\nold\n{END}\nalso by hand\n")
    rows = results(
        [
            report("good[a]", "passed", times=3),
            report("good[b]", "passed", times=4),
            report("bad[a]", "passed"),
            report("bad[b]", "failed"),
            report("broken", "failed", when="setup"),
            report("left", "passed"),
            report("left", "failed", when="teardown"),
            report("absent", "skipped", when="setup", why=("x.py", 1, "Skipped: no strace here")),
        ]
    )
    write_report(document, rows)
    text = document.read_text()
    assert text.startswith("by hand\n")
    assert text.endswith("also by hand\n")
    assert "old" not in text
    assert "| fault of good | how | 7 | all is well | `x.py::good` |" in text
    assert "| fault of bad | how | 2 | **1 OF 2 TESTS FAILED**; wanted: all is well | `x.py::bad` |" in text
    assert "| fault of broken | how | 1 | **1 OF 1 TESTS FAILED**" in text
    assert "| fault of left | how | 1 | **1 OF 1 TESTS FAILED**" in text
    assert "| fault of absent | how | 0 | not run: no strace here | `x.py::absent` |" in text
    assert "11 faults put in by 5 tests, **3 FAILED**" in text


def test_parts_come_together_and_a_document_without_a_place_is_refused(tmp_path: Path) -> None:
    parts = [tmp_path / "a.json", tmp_path / "b.json"]
    for part, name in zip(parts, ("one", "two"), strict=True):
        write_report(part, results([report(name, "passed")]))
        assert len(json.loads(part.read_text())) == 1
    document = tmp_path / "reliability.md"
    document.write_text("nothing marked")
    with pytest.raises(pytest.UsageError, match="region"):
        main([str(document), *map(str, parts)])
    document.write_text(f"{BEGIN}{END}")
    main([str(document), *map(str, parts)])
    assert "fault of one" in document.read_text()
    assert "fault of two" in document.read_text()
