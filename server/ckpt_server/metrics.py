"""What the server tells Prometheus: every event it logs, counted, and where the steps of each run stand.

Metric names follow the log: the event ``upload.done`` is ``ckpt_events_total{event="upload.done"}``. Nothing
here is kept up to date by the code that works; gauges are read from the step table when they are asked for.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter as Tally
from collections.abc import Iterator
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ckpt.clock import Clock
from ckpt.errors import UnavailableError
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import staging_pb2
from ckpt_server.runs import Runs
from ckpt_server.settings import Settings
from ckpt_server.steps import StepRecord, StepTable, oldest_pending_s

__all__ = ["Metrics"]

_Status = staging_pb2.StepStatus
_STATES = _Status.DESCRIPTOR.enum_types_by_name["State"].values_by_number


class _EventHandler(logging.Handler):
    """Counts what :func:`ckpt.events.event` logs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._events = Counter(
            "ckpt_events", "log events, by name and level", ("event", "level"), registry=registry
        )
        self._nbytes = Counter(
            "ckpt_event_bytes", "sum of an event's field nbytes", ("event",), registry=registry
        )
        self._elapsed_s = Counter(
            "ckpt_event_seconds", "sum of an event's field elapsed_s", ("event",), registry=registry
        )

    def emit(self, record: logging.LogRecord) -> None:
        name, fields = getattr(record, "event", None), getattr(record, "fields", None)
        if name is None or fields is None:
            return
        self._events.labels(name, record.levelname.lower()).inc()
        for field, counter in (("nbytes", self._nbytes), ("elapsed_s", self._elapsed_s)):
            value = fields.get(field)
            if isinstance(value, int | float) and value >= 0:
                counter.labels(name).inc(value)


class _Steps(Collector):
    """Gauges over the step table, the queues and the disk, at the moment of the scrape."""

    def __init__(self, staging: StagingDir, runs: Runs, table: StepTable, clock: Clock) -> None:
        self._staging = staging
        self._runs = runs
        self._table = table
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        records = self._table.records()
        url_of = {run.key: run.config.url for run in self._runs.all()}
        yield _by_state(records, url_of)
        yield _newest("ckpt_newest_sealed_step", "newest step sealed on this node", records, url_of)
        committed = [record for record in records if record.state == _Status.STATE_COMMITTED]
        yield _newest("ckpt_newest_committed_step", "newest step known here as committed", committed, url_of)
        pending = GaugeMetricFamily(
            "ckpt_pending_bytes", "sealed here and not in the store yet", labels=["run"]
        )
        for key, url in url_of.items():
            owed = [r for r in records if r.run_key == key and r.is_owed]
            pending.add_metric(
                [url], sum(n for r in owed for rank, n in r.nbytes.items() if rank not in r.uploaded)
            )
        yield pending
        jobs = GaugeMetricFamily("ckpt_queued_jobs", "jobs queued or running", labels=["run", "queue"])
        for run in self._runs.all():
            jobs.add_metric([run.config.url, "uploads"], len(run.uploads))
            jobs.add_metric([run.config.url, "control"], len(run.control))
            jobs.add_metric([run.config.url, "deletions"], len(run.deletions))
        yield jobs
        yield GaugeMetricFamily(
            "ckpt_oldest_pending_seconds",
            "age of the oldest step that is sealed here and not committed",
            value=oldest_pending_s(records, self._clock.now()),
        )
        yield GaugeMetricFamily(
            "ckpt_staging_free_bytes",
            "free space where the staging directory is",
            value=shutil.disk_usage(self._staging.path).free,
        )


class Metrics:
    """The metrics of one server. ``start`` serves them over HTTP, ``stop`` ends that.

    Attributes:
        registry: to read them without HTTP.
    """

    def __init__(
        self, settings: Settings, staging: StagingDir, runs: Runs, table: StepTable, clock: Clock
    ) -> None:
        self._settings = settings
        self._server: WSGIServer | None = None
        self.registry = CollectorRegistry()
        self.registry.register(_Steps(staging, runs, table, clock))
        ProcessCollector(registry=self.registry)
        self._handler = _EventHandler(self.registry)

    def start(self) -> str | None:
        """Count events and, where asked for, serve ``/metrics``; return the address that was bound.

        Raises:
            UnavailableError: the address cannot be bound.
        """
        logging.getLogger("ckpt").addHandler(self._handler)
        address = self._settings.metrics_listen
        if address is None:
            return None
        host, _, port = address.rpartition(":")
        cert, key = self._settings.tls_cert, self._settings.tls_key
        try:
            self._server, _ = start_http_server(
                int(port),
                host.strip("[]"),
                registry=self.registry,
                certfile=str(cert) if cert else None,
                keyfile=str(key) if key else None,
            )
        except OSError as error:
            raise UnavailableError(
                "cannot listen for metrics", code="bind", address=address, reason=error.strerror
            ) from error
        return f"{host}:{self._server.server_port}"

    def stop(self) -> None:
        logging.getLogger("ckpt").removeHandler(self._handler)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def _by_state(records: list[StepRecord], url_of: dict[str, str]) -> Metric:
    metric = GaugeMetricFamily("ckpt_steps", "steps on this node, by state", labels=["run", "state"])
    counts = Tally((record.run_key, int(record.state)) for record in records)
    for key, url in url_of.items():
        for number, value in _STATES.items():
            if number:  # 0 is "unspecified"
                state = value.name.removeprefix("STATE_").lower()
                metric.add_metric([url, state], counts[key, number])
    return metric


def _newest(name: str, text: str, records: list[StepRecord], url_of: dict[str, str]) -> Metric:
    metric = GaugeMetricFamily(name, text, labels=["run"])
    for key, url in url_of.items():
        idents = [record.ident for record in records if record.run_key == key]
        if idents:
            metric.add_metric([url], max(idents, key=lambda ident: (ident.attempt, ident.step)).step)
    return metric
