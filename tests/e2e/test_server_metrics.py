"""What Prometheus reads from a running server, over real HTTP."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ckpt.format.ids import CheckpointId
from tests.support.sealing import make_world
from tests.support.server import Server, eventually, save

FIRST, SECOND = CheckpointId(10, 1), CheckpointId(20, 1)


def scrape(server: Server) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """(name, labels) -> value."""
    with urllib.request.urlopen(f"http://{server.info()['metrics']}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_tell_where_the_steps_of_a_run_stand(tmp_path: Path, url: str) -> None:
    world = make_world()
    with Server(tmp_path / "staging", "--metrics-listen", "127.0.0.1:0") as server:
        for ident in (FIRST, SECOND):
            server.wait_for(save(server, url, world, ident), ident)
        found = scrape(server)
    run = ("run", url)
    assert found["ckpt_steps", frozenset([run, ("state", "committed")])] == 2
    assert found["ckpt_steps", frozenset([run, ("state", "failed")])] == 0
    assert found["ckpt_newest_committed_step", frozenset([run])] == 20
    assert found["ckpt_pending_bytes", frozenset([run])] == 0
    assert found["ckpt_oldest_pending_seconds", frozenset()] == 0
    assert found["ckpt_staging_free_bytes", frozenset()] > 0
    committed = frozenset([("event", "step.committed"), ("level", "info")])
    assert found["ckpt_events_total", committed] == 2
    assert found["process_resident_memory_bytes", frozenset()] > 0


def test_a_store_that_is_away_shows_as_pending_bytes_and_retries(tmp_path: Path) -> None:
    """Case I62."""
    world = make_world()
    (tmp_path / "store").write_text("a file where the directory should be")
    with Server(tmp_path / "staging", "--metrics-listen", "127.0.0.1:0") as server:
        url = f"file://{tmp_path}/store/run"
        save(server, url, world, FIRST)

        def is_owed() -> bool:
            found = scrape(server)
            pending = found.get(("ckpt_pending_bytes", frozenset([("run", url)])), 0)
            return pending > 0 and found["ckpt_oldest_pending_seconds", frozenset()] > 0

        eventually(is_owed, what="the sealed step is owed")


@pytest.mark.parametrize("address", ["9464", "localhost:", "host:http"])
def test_a_malformed_address_is_refused(tmp_path: Path, address: str) -> None:
    server = Server(tmp_path / "staging", "--metrics-listen", address)
    assert server.spawn().wait(20) == 2
    assert "--metrics-listen: give HOST:PORT" in server.log()


def test_an_address_in_use_is_an_error(tmp_path: Path) -> None:
    with Server(tmp_path / "one", "--metrics-listen", "127.0.0.1:0") as server:
        second = Server(tmp_path / "two", "--metrics-listen", str(server.info()["metrics"]))
        assert second.spawn().wait(20) == 1
        assert "cannot listen for metrics" in second.log()
