"""Texts and tables of the ckpt command."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from ckpt.cli import render
from ckpt.cli.records import Problem
from ckpt.cli.render import (
    Cell,
    Column,
    counted,
    human_bytes,
    human_ranks,
    human_seconds,
    human_time,
    print_json,
    print_pairs,
    print_table,
)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (12_605_456, "12.0 MiB"),
        (1_048_575, "1.00 MiB"),
        (999 * 1024, "999 KiB"),
        (10 * 2**30 - 1, "10.0 GiB"),
        (3 * 2**50, "3.00 PiB"),
        (5000 * 2**50, "5000 PiB"),
    ],
)
def test_sizes_have_three_digits_and_binary_units(nbytes: int, text: str) -> None:
    assert human_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "-"),
        ([3], "3"),
        ([0, 1, 2, 3], "0-3"),
        ([0, 1, 5, 7, 8], "0-1,5,7-8"),
        (list(range(0, 64, 2)), "32 ranks: 0,2,4,6,..."),
    ],
)
def test_ranks_are_shown_as_ranges(ranks: list[int], text: str) -> None:
    assert human_ranks(ranks) == text


def test_counts_durations_and_missing_times_read_as_words() -> None:
    assert [counted(n, "rank") for n in (0, 1, 2048)] == ["0 ranks", "1 rank", "2,048 ranks"]
    assert [human_seconds(s) for s in (3.2, 600.0, 9000.0)] == ["3 s", "10 min", "2.5 h"]
    assert human_time(None) == "-"


def test_a_table_on_a_pipe_is_plain_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    name = "model.layers." + "x" * 300
    print_table(
        [Column("NAME", fold=True), Column("SIZE", right=True)],
        [(name, "1 B"), ("b", Cell("999 MiB", "bold red")), ("層.重み", "2 B")],
    )

    head, first, second, third = capsys.readouterr().out.splitlines()
    assert head.startswith("NAME ")
    assert first == f"{name}      1 B"
    assert second.endswith("  999 MiB")
    assert third.endswith("      2 B")
    assert len(third) == len(first) - 3  # three of its characters are two columns wide


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stdout is a terminal of 60 columns without colours."""
    console = Console(force_terminal=True, width=60, color_system=None)
    monkeypatch.setattr(render, "_output", lambda: console)


@pytest.mark.usefixtures("terminal")
def test_a_terminal_folds_the_one_column_that_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    name = "model.layers.11.self_attention.query.weight"
    print_table([Column("NAME", fold=True), Column("LAYOUT")], [(name, "dp=4:SS(0,2) tp=2:S(0)")])

    head, first, second = capsys.readouterr().out.splitlines()
    assert head.index("LAYOUT") == first.index("dp=4")
    assert len(first) <= 60
    assert first.split()[0] + second == name


@pytest.mark.usefixtures("terminal")
def test_a_narrow_terminal_gets_two_lines_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    name = "model.layers.11.self_attention.query.weight"
    print_table(
        [Column("NAME", fold=True), Column("LAYOUT"), Column("RANKS")],
        [(name, "dp_shard=4:SS(0,2) tp=2:S(0)", "0-7")],
    )

    assert capsys.readouterr().out.splitlines() == [
        "NAME",
        "    LAYOUT                        RANKS",
        name,
        "    dp_shard=4:SS(0,2) tp=2:S(0)  0-7",
    ]


@pytest.mark.usefixtures("terminal")
def test_long_facts_fold_between_words(capsys: pytest.CaptureFixture[str]) -> None:
    print_pairs(
        [("size", "1 B"), ("environment", "torch=2.13.0 deterministic_algorithms=False python=3.11.7")]
    )

    assert capsys.readouterr().out.splitlines() == [
        "size         1 B",
        "environment  torch=2.13.0 deterministic_algorithms=False",
        "             python=3.11.7",
    ]


def test_records_become_json_objects(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"problem": Problem(kind="CorruptError", code="digest", message="m", context={"chunk": "3"})})

    assert json.loads(capsys.readouterr().out) == {
        "problem": {"kind": "CorruptError", "code": "digest", "message": "m", "context": {"chunk": "3"}}
    }
