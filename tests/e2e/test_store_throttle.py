"""A store that throttles whoever asks too often under one prefix: few objects, spread, and patience."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from pathlib import Path
from urllib.parse import parse_qs

from ckpt.format.ids import CheckpointId
from ckpt.ops.catalog import load_checkpoint
from ckpt.ops.verify import verify_deep
from ckpt.storage.open import open_store
from tests.support.faultproxy import FaultProxy
from tests.support.s3 import Ministack
from tests.support.sealing import make_world
from tests.support.server import Server, save

ID = CheckpointId(10, 1)
MOST = 2  # requests per prefix and window
WINDOW_S = 0.3
RANKS = tuple(range(8))


class Throttle:
    """A fault: 503 to every request above the rate of its prefix, as of stores that part keys by prefix."""

    def __init__(self) -> None:
        self.refused = 0
        self.puts: Counter[str] = Counter()
        self._seen: dict[str, list[float]] = defaultdict(list)

    def __call__(self, method: str, path: str) -> int | None:
        where, _, query = path.partition("?")
        listed = parse_qs(query).get("prefix", [""])[0]
        _run, *parts = [*where.split("/")[2:], *listed.split("/")] if listed else where.split("/")[2:]
        prefix = "/".join(parts[:2] if parts[:1] == ["data"] else parts[:1])
        now = time.monotonic()
        recent = self._seen[prefix] = [at for at in self._seen[prefix] if now - at < WINDOW_S]
        if len(recent) >= MOST:
            self.refused += 1
            return 503
        recent.append(now)
        if method == "PUT":
            self.puts["/".join(parts)] += 1
        return None


def test_step_is_committed_through_a_store_that_throttles_by_prefix(
    tmp_path: Path, s3_server: Ministack
) -> None:
    """Case I98."""
    world = make_world(rows=256, groups=(RANKS,))
    url = f"s3://{s3_server.make_bucket()}/run"
    with FaultProxy(s3_server.port) as proxy:
        proxy.fault = throttle = Throttle()
        environment = s3_server.env | {"AWS_ENDPOINT_URL": proxy.endpoint}
        with Server(tmp_path / "staging", environment=environment) as server:
            server.wait_for(save(server, url, world, ID), ID, timeout_s=60)
    assert throttle.refused > 0
    data = [path for path in throttle.puts if path.startswith("data/")]
    assert len(data) == len(RANKS)  # an object per rank, however many tensors
    assert len({path.split("/")[1] for path in data}) > len(data) / 2
    store = open_store(url, s3_server.options)
    assert verify_deep(load_checkpoint(store, ID)) == []
    store.close()
