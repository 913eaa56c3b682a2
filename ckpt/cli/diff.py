"""``ckpt diff``: in what do two checkpoints differ?"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt.cli.options import EXIT_DIFFERENT, OutputOptions, StoreOptions
from ckpt.errors import InvalidInputError, NotFoundError
from ckpt.urls import absolute_url

if TYPE_CHECKING:
    from ckpt.ops.compare import Tolerance
    from ckpt.ops.diff import Side, TensorDiff, TensorDiffs
    from ckpt.ops.diff_values import ValueDiff
    from ckpt.repository import Repository

__all__ = ["diff_command"]

_SIDE = re.compile(r"(?P<url>.*)@(?P<checkpoint>latest|\d{1,12}|\d{12}\.a\d{6})", re.DOTALL)


def diff_command(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="URL[@CHECKPOINT]; without it the latest.", show_default=False),
    ],
    b: Annotated[
        str,
        typer.Argument(metavar="B", help="The same; @CHECKPOINT alone: of the run of A.", show_default=False),
    ],
    *,
    match: Annotated[
        str, typer.Option(metavar="GLOB", help='Only tensors and values whose name fits, e.g. "model.*".')
    ] = "*",
    atol: Annotated[
        float | None,
        typer.Option(min=0, metavar="X", help="Bear an absolute difference of X.", show_default=False),
    ] = None,
    rtol: Annotated[
        float | None,
        typer.Option(min=0, metavar="X", help="Bear a difference of X times B's.", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="Rows per table at most.")] = 50,
    show_all: Annotated[bool, typer.Option("--all", help="Every row.")] = False,
    store: StoreOptions,
    output: OutputOptions,
) -> None:
    """Compare two checkpoints, of one run or of two: tensors by bits, and plain values.

    With --atol or --rtol, floating-point differences up to atol + rtol * abs(b) are borne, and NaN equals
    NaN. Exits with 0 where nothing differs, with 1 where something does. Data is read only where digests do
    not prove that it is equal.
    """
    from ckpt.ops.compare import Tolerance
    from ckpt.ops.diff_values import diff_values
    from ckpt.repository import Repository

    tolerance = None if atol is None and rtol is None else Tolerance(atol or 0.0, rtol or 0.0)
    left, right = _sides(a, b)
    with (
        Repository(left.url, store.as_mapping()) as run_a,
        Repository(right.url, store.as_mapping()) as run_b,
    ):
        side_a = _open(run_a, left.checkpoint, store)
        side_b = _open(run_b, right.checkpoint, store)
        one, other = side_a.checkpoint, side_b.checkpoint
        tensors = _compare(side_a, side_b, match, tolerance)
        values = diff_values(one, other, match=lambda path: fnmatchcase(path, match), tolerance=tolerance)
        if not (tensors.equal or tensors.found or values.compared):
            raise NotFoundError("no tensor or value fits the pattern", code="no-tensor", match=match)
        notes = _notes(side_a, side_b)
        result = _Result(
            a={"url": left.url, "checkpoint": str(one.ident)},
            b={"url": right.url, "checkpoint": str(other.ident)},
            tolerance=tolerance,
            tensors=tensors,
            values=values.found,
            notes=notes,
        )
    _show(result, output, limit=max(len(tensors.found), len(values.found)) if show_all else limit)
    if not result.is_equal:
        raise typer.Exit(EXIT_DIFFERENT)


@dataclass(frozen=True, slots=True)
class _Named:
    url: str
    checkpoint: str


@dataclass(frozen=True, slots=True)
class _Result:
    a: dict[str, str]
    b: dict[str, str]
    tolerance: Tolerance | None
    tensors: TensorDiffs
    values: list[ValueDiff]
    notes: list[str]

    @property
    def is_equal(self) -> bool:
        return all(item.is_tolerated for item in self.tensors.found) and all(
            item.is_tolerated for item in self.values
        )


def _sides(a: str, b: str) -> tuple[_Named, _Named]:
    left = _parse(a)
    right = _parse(b)
    if not left.url:
        raise InvalidInputError("the first side needs a URL", code="usage", a=a)
    if not right.url:
        right = _Named(left.url, right.checkpoint)
    return _Named(absolute_url(left.url), left.checkpoint), _Named(absolute_url(right.url), right.checkpoint)


def _parse(text: str) -> _Named:
    found = _SIDE.fullmatch(text)
    return _Named(text, "latest") if found is None else _Named(found["url"], found["checkpoint"])


def _open(run: Repository, checkpoint: str, store: StoreOptions) -> Side:
    from ckpt.format.keys import run_key
    from ckpt.ops.diff import Side
    from ckpt.ops.tiers import node_tiers
    from ckpt.storage.staging import StagingDir, default_staging_path

    staging = StagingDir(store.staging or default_staging_path())
    return Side(run.open(checkpoint), node_tiers(staging, run_key(run.url)))


def _compare(a: Side, b: Side, match: str, tolerance: Tolerance | None) -> TensorDiffs:
    from ckpt.cli.render import progress_bar
    from ckpt.ops.diff import diff_tensors

    with progress_bar("comparing", in_bytes=True) as update:
        return diff_tensors(
            a, b, match=lambda name: fnmatchcase(name, match), tolerance=tolerance, progress=update
        )


def _notes(a: Side, b: Side) -> list[str]:
    one, other = a.checkpoint.manifest, b.checkpoint.manifest
    notes = []
    if one.world_size != other.world_size:
        notes.append(
            f"{one.world_size} and {other.world_size} ranks: values of single ranks were not compared"
        )
    if one.has_explicit_boxes or other.has_explicit_boxes:
        notes.append("some state follows no mesh and was not compared")
    return notes


def _show(result: _Result, output: OutputOptions, *, limit: int) -> None:
    from ckpt.cli.render import print_json, print_line

    if output.json:
        print_json(_document(result))
        return
    _print_tensors(result.tensors.found, limit)
    _print_values(result.values, limit)
    for note in result.notes:
        print_line(note, "yellow")
    _print_sum(result)


def _document(result: _Result) -> dict[str, Any]:
    tolerance = result.tolerance
    found = result.tensors
    return {
        "a": result.a,
        "b": result.b,
        "equal": result.is_equal,
        "tolerance": None if tolerance is None else {"atol": tolerance.atol, "rtol": tolerance.rtol},
        "tensors": {
            "equal": found.equal,
            "equal_by_digest": found.equal_by_digest,
            "read_nbytes": found.read_nbytes,
            "differences": [_tensor_document(item) for item in found.found],
        },
        "values": {
            "differences": [
                {"path": item.path, "a": item.a, "b": item.b, "tolerated": item.is_tolerated}
                for item in result.values
            ]
        },
        "notes": result.notes,
    }


def _tensor_document(item: TensorDiff) -> dict[str, Any]:
    numbers = item.difference
    return {
        "name": item.name,
        "problem": str(item.problem),
        "a": item.a,
        "b": item.b,
        "tolerated": item.is_tolerated,
        "elements": item.elements,
        "differing": numbers.differing,
        "beyond": numbers.beyond,
        "nans": numbers.nans,
        "max_abs": _finite(numbers.max_abs),
        "max_rel": _finite(numbers.max_rel),
    }


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"  # JSON has no infinity


def _print_tensors(found: list[TensorDiff], limit: int) -> None:
    from ckpt.cli.render import Column, print_line, print_table

    if not found:
        return
    print_table(
        [
            Column("TENSOR", fold=True),
            Column("DIFFERENCE"),
            Column("ELEMENTS", right=True),
            Column("MAX ABS", right=True),
            Column("MAX REL", right=True),
            Column("NAN", right=True),
        ],
        [_row(item) for item in found[:limit]],
    )
    if len(found) > limit:
        print_line(f"... {len(found) - limit:,} more tensors; --all shows them, --match GLOB picks some")
    print_line()


def _row(item: TensorDiff) -> tuple[str, ...]:
    numbers = item.difference
    if not numbers.differing:
        what = {"only-in-a": f"only in A: {item.a}", "only-in-b": f"only in B: {item.b}"}
        return item.name, what.get(item.problem, f"{item.problem}: {item.a} / {item.b}"), "-", "-", "-", "-"
    return (
        item.name,
        "within tolerance" if item.is_tolerated else "differs",
        f"{numbers.differing:,} of {item.elements:,}",
        f"{numbers.max_abs:.3g}",
        f"{numbers.max_rel:.3g}",
        f"{numbers.nans:,}" if numbers.nans else "-",
    )


def _print_values(found: list[ValueDiff], limit: int) -> None:
    from ckpt.cli.render import Column, print_line, print_table

    if not found:
        return
    print_table(
        [Column("VALUE", fold=True), Column("A"), Column("B")],
        [(item.path, _side_text(item.a), _side_text(item.b)) for item in found[:limit]],
    )
    if len(found) > limit:
        print_line(f"... {len(found) - limit:,} more values; --all shows them, --match GLOB picks some")
    print_line()


def _side_text(text: str | None) -> str:
    return "(not there)" if text is None else text


def _print_sum(result: _Result) -> None:
    from ckpt.cli.render import counted, print_line

    tensors = result.tensors
    borne = sum(item.is_tolerated for item in tensors.found)
    parts = [
        f"{counted(tensors.equal, 'tensor')} equal",
        f"{len(tensors.found) - borne:,} different",
        *([f"{borne:,} within tolerance"] if result.tolerance is not None else []),
        f"{counted(sum(not item.is_tolerated for item in result.values), 'value')} different",
    ]
    style = "green" if result.is_equal else "bold red"
    print_line(f"{'equal' if result.is_equal else 'different'}: {', '.join(parts)}", style)
    for name, side in (("A", result.a), ("B", result.b)):
        print_line(f"  {name}: {side['checkpoint']} in {side['url']}")
