"""The benchmarks' own arithmetic, accounting and documents; what of the GPU script needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import catalog, checksums, codec, document
from benchmarks.__main__ import BENCHMARKS
from benchmarks.accounting import Cost, Meter, PeakMemory, tree_cpu_s
from benchmarks.contestant import ContestantError, Turn, rounds
from benchmarks.gpu import GpuTraining, OurSaver, config_for, main, measure
from benchmarks.limits import RawFile
from benchmarks.options import Options
from benchmarks.peers import PEERS, Peer, missing
from benchmarks.report import Report, Row
from benchmarks.training import make_training, state_nbytes


def test_ratio_is_the_median_over_the_rounds_not_of_the_medians() -> None:
    report = Report("r", "c")
    base = report.add("base", [1.0, 2.0, 4.0])
    row = report.add("row", [3.0, 4.0, 40.0], over=base)
    assert row.ratio == 3.0  # of 3, 2, 10
    assert report.add("share", [2.0, 4.0, 8.0], over=base, inverse=True).ratio == 0.5


def test_ratio_of_rows_that_were_not_played_in_rounds_together_is_that_of_the_medians() -> None:
    report = Report("r", "c")
    base = report.add("base", [1.0, 1.0, 9.0])
    assert report.add("row", [4.0, 2.0], over=base).ratio == 3.0


@pytest.mark.parametrize(
    ("bar", "ratio", "met"),
    [("<= 1.05", 1.05, True), ("<= 1.05", 1.06, False), (">= 0.95", 0.94, False), (">= 0.95", 1.2, True)],
)
def test_bar_is_met_on_its_own_side_only(bar: str, ratio: float, met: bool) -> None:
    assert Row(what="x", values=[1.0], ratio=ratio, bar=bar).meets_bar() is met
    assert Row(what="x", values=[1.0], ratio=ratio).meets_bar() is None


def test_merged_runs_have_all_repeats_and_their_ratio() -> None:
    runs = []
    for values in ([2.0, 2.0], [6.0, 6.0, 6.0]):
        report = Report("r", "c")
        base = report.add("base", [1.0] * len(values))
        report.add("row", values, over=base, cpu_s=values)
        runs.append(report)
    runs[1].absent("gone", "not installed: x")
    runs[1].merge(Report.from_json(json.loads(json.dumps(runs[0].to_json()))))
    row = next(row for row in runs[1].rows if row.what == "row")
    assert row.values == row.cpu_s == [2.0, 2.0, 6.0, 6.0, 6.0]
    assert row.ratio == 6.0


def test_runs_under_other_conditions_are_not_merged() -> None:
    with pytest.raises(ValueError, match="other conditions"):
        Report("r", "256 MiB").merge(Report("r", "128 MiB"))


def test_what_could_not_be_measured_is_named_in_table_json_and_document(tmp_path: Path) -> None:
    report = Report("r", "c")
    report.add("row", [1.0])
    report.absent("other library", "not installed: other")
    report.publish(tmp_path)
    body = json.loads((tmp_path / "r.json").read_text())
    assert body["rows"][1] | {"what": "other library", "absent": "not installed: other"} == body["rows"][1]
    assert "| other library | | not installed: other |" in document.render([body])
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_results_replace_what_stands_between_the_marks_and_nothing_else() -> None:
    text = f"head\n{document.BEGIN}\nold\n{document.END}\ntail\n"
    once = document.insert(text, "new")
    assert once == document.insert(once, "new") == f"head\n{document.BEGIN}\n\nnew\n{document.END}\ntail\n"
    with pytest.raises(ValueError, match="has no lines"):
        document.insert("nothing here", "new")


def test_the_document_has_the_marks_and_names_every_benchmark() -> None:
    text = document.DOCUMENT.read_text()
    assert document.insert(text, "x")
    assert [name for name in BENCHMARKS if f"`{name}`" not in text] == []


def test_meter_counts_the_cpu_of_children_that_have_ended() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    with Meter() as meter:
        subprocess.run([sys.executable, "-c", burn], check=True)
    assert meter.cost.cpu_s >= 0.25
    assert meter.cost.wall_s >= meter.cost.cpu_s / (os.cpu_count() or 1) - 0.05
    assert 0.0 <= meter.cost.foreign <= 1.0
    assert tree_cpu_s(os.getpid()) >= meter.cost.cpu_s


def test_peak_memory_sees_what_was_taken_and_given_back() -> None:
    with PeakMemory() as peak:
        block = bytearray(64 << 20)
        block[::4096] = b"\1" * len(block[::4096])
        peak._peak = max(peak._peak, peak._now())  # what the watching thread does 20 times a second
        del block
    assert peak.extra_nbytes >= 60 << 20


def test_raw_file_comes_back_as_written_by_every_writer_and_reader(tmp_path: Path) -> None:
    raw = RawFile(3 << 20)
    raw.write(tmp_path / "a", 4, 1 << 20)
    raw.write(tmp_path / "a", 4, 1 << 20, in_place=True)
    expected = bytes(raw._buffer)
    for direct in (True, False):
        raw._buffer[:] = bytes(len(raw._buffer))
        raw.read(tmp_path / "a", 2, 1 << 20, direct=direct)
        assert bytes(raw._buffer) == expected


def test_training_has_about_the_size_that_was_asked_for_and_its_digest_sees_a_swap() -> None:
    training = make_training(16 << 20)
    assert 0.8 < state_nbytes(training) / (16 << 20) < 1.2
    before = training.digest()
    weight = training.tensors()["model.head.weight"]
    weight[0, 0], weight[0, 1] = weight[0, 1].clone(), weight[0, 0].clone()
    changed = {name for name, value in training.digest().items() if value != before[name]}
    assert changed == {"model.head.weight"}


def test_every_peer_has_its_own_title_and_a_known_durability() -> None:
    known = {"-", "none", "fsync file", "fsync file+dir", "sealed", "committed"}
    assert {peer.durability for peer in PEERS.values()} <= known
    for title, peer in PEERS.items():
        assert peer.title == title
        for name in (each for each in vars(Peer) if not each.startswith("_")):
            assert hasattr(peer, name), (title, name)


def test_a_peer_that_is_not_installed_says_what_is_missing() -> None:
    class Nowhere:
        needs = ("json", "a_package_that_nobody_has")

    assert missing(Nowhere) == ["a_package_that_nobody_has"]  # type: ignore[arg-type]


def test_only_lets_through_by_parts_of_titles_and_what_is_always_needed() -> None:
    options = Options(only=("ckpt", "DCP"))
    assert options.chosen(["ckpt, x", "torch.save", "DCP save"], always=["torch.save"]) == [
        "ckpt, x",
        "torch.save",
        "DCP save",
    ]
    assert Options().chosen(["a", "b"]) == ["a", "b"]


def test_gpu_benchmark_refuses_clearly_without_a_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0


def test_gpu_model_has_about_the_size_that_was_asked_for() -> None:
    for gib in (1, 4, 8, 16):
        config = config_for(gib << 30)
        parameters = 12 * config.dim**2 * config.layers + 2 * config.vocab * config.dim
        assert 0.8 < parameters * 12 / (gib << 30) < 1.2


def test_gpu_measurement_runs_with_our_saver_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.gpu.SAVERS", {OurSaver.title: OurSaver})
    training = GpuTraining.make(8 << 20, "cpu", batch=1)
    training.forward_backward()
    training.update()
    report = Report("gpu", "cpu")
    measure(report, training, tmp_path, repeats=1)
    assert [row.what for row in report.rows if row.values] == [
        "training step, bf16",
        "ckpt, overlapped: first save blocks",
        "ckpt, overlapped: later saves block",
        "ckpt, overlapped: stall and slow-down until done",
    ]


class _Player:
    """Stands for a contestant's process: what ``rounds`` sees of it."""

    def __init__(self, title: str, fails_at: int | None = None) -> None:
        self.title = title
        self._fails_at = fails_at
        self.played = 0

    def play(self, turn: object, **arguments: object) -> Turn:
        self.played += 1
        if self.played == self._fails_at:
            raise ContestantError("broke")
        return Turn(self.played, Cost(0.0, 0.0, 0.0))

    def close(self) -> None:
        pass


def test_who_fails_is_out_and_named_and_the_others_play_on() -> None:
    good, bad = _Player("good"), _Player("bad", fails_at=2)
    report = Report("r", "c")
    running: Any = [good, bad]
    turns = rounds(running, report, 3, len)
    assert [turn.value for turn in turns["good"]] == [1, 2, 3]
    assert "bad" not in turns
    assert running == [good]
    assert [(row.what, row.absent) for row in report.rows] == [("bad", "failed: broke")]


def test_when_the_time_is_up_one_round_is_played_and_no_more() -> None:
    options = Options(seconds=0.0, began_at=0.0)
    player: Any = _Player("good")
    turns = rounds([player], Report("r", "c"), 3, len, time_is_up=options.time_is_up)
    assert len(turns["good"]) == 1
    assert not Options().time_is_up()


def test_codec_and_checksums_measure_what_comes_back_whole() -> None:
    options = Options(quick=True)
    rows = {row.what: row for row in (*codec.run(options).rows, *checksums.run(options).rows)}
    assert 0.5 < (rows["whole state: stored"].ratio or 0.0) < 1.0
    assert rows["written with a checksum per chunk"].ratio is not None


def test_what_the_time_does_not_allow_is_named() -> None:
    report = catalog.run(Options(quick=True, seconds=0.0, began_at=0.0))
    measured = [row.what for row in report.rows if row.values and row.what.startswith("list")]
    assert measured == ["list, memory, 10 checkpoints", "list, directory, 10 checkpoints"]
    assert [row.what for row in report.rows if row.absent] == [
        "memory, 100 checkpoints",
        "memory, 1000 checkpoints",
        "directory, 100 checkpoints",
        "directory, 1000 checkpoints",
        "S3, 10 checkpoints",
        "S3, 100 checkpoints",
        "S3, 1000 checkpoints",
    ]
