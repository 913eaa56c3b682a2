"""The runs that this server knows, and their stores."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping

from ckpt.clock import Clock
from ckpt.errors import CkptError, InvalidInputError, NotFoundError
from ckpt.events import event, get_logger
from ckpt.format import keys
from ckpt.ops.known_groups import KnownGroups
from ckpt.storage.base import Store
from ckpt.storage.open import open_store
from ckpt.storage.staging import RunConfig, StagingDir
from ckpt_server.chunk_source import encoder_threads
from ckpt_server.compression import COMPRESSION, Compression
from ckpt_server.lending import Lending
from ckpt_server.work import WorkQueue

__all__ = ["Run", "Runs", "check_options"]

_log = get_logger("server.runs")

_SECRET_WORDS = (
    "secret",
    "token",
    "passw",
    "account_key",
    "sas",
    "credential",
    "private",
    "connection_string",
)
_USER_INFO = re.compile(r"://[^/]*:[^/]*@")

StoreOpener = Callable[[str, Mapping[str, str] | None], Store]


def check_options(options: Mapping[str, str]) -> None:
    """Raise InvalidInputError where a secret is among store options, which are written to disk."""
    for name in options:
        if any(word in name.lower() for word in _SECRET_WORDS):
            raise InvalidInputError(
                "store options are written to disk: give secrets in the server's environment",
                code="secret",
                option=name,
            )


def check_url(url: str) -> None:
    """Raise InvalidInputError where a URL carries a password or a signature: it is logged."""
    if _USER_INFO.search(url) or "?" in url:
        raise InvalidInputError(
            "a run's URL is written to disk and logs: give passwords and signatures in the environment",
            code="secret",
        )


class Run:
    """One run: its configuration, its store and its queues. Thread-safe.

    Attributes:
        key: folder below ``runs/``.
        uploads: segments on their way, ``upload_concurrency`` at once.
        control: everything short (probe, publish, commit, local retention), so that the commit of one step
            never waits for the upload of the next.
        deletions: retention in the store, which can take minutes and holds up nothing.
        lending: what its segments may borrow.
        compression: whether compressing its uploads pays.
        known_groups: what commits of this run have proved already.
    """

    def __init__(
        self, key: str, config: RunConfig, *, opener: StoreOpener, workers: int, clock: Clock
    ) -> None:
        self.key = key
        self.uploads = WorkQueue(f"upload-{key}", workers=workers, clock=clock)
        self.control = WorkQueue(f"control-{key}", workers=1, clock=clock)
        self.deletions = WorkQueue(f"deletions-{key}", workers=1, clock=clock)
        self.lending = Lending()
        self.compression = Compression(threads=encoder_threads(), clock=clock, name=key)
        self._opener = opener
        self._lock = threading.Lock()
        self._config = config  # guarded by self._lock
        self._store: Store | None = None  # guarded by self._lock
        self._conditional: bool | None = None  # guarded by self._lock
        self.known_groups = KnownGroups()
        self.probed = threading.Event()

    @property
    def config(self) -> RunConfig:
        with self._lock:
            return self._config

    def reconfigure(self, config: RunConfig) -> None:
        """Take over a changed configuration; other store options open the store anew."""
        with self._lock:
            if dict(config.store_options) != dict(self._config.store_options):
                # Not closed: an upload may be using it. It goes when the last user lets go.
                self._store = None
            self._config = config

    @property
    def store(self) -> Store:
        """The store at the run's URL, opened when first asked for. Raises CkptError."""
        with self._lock:
            if self._store is None:
                self._store = self._opener(self._config.url, self._config.store_options)
            return self._store

    @property
    def conditional(self) -> bool:
        """What the probe found; False until it has been made."""
        with self._lock:
            return bool(self._conditional)

    def probe(self) -> bool:
        """Ask the store once whether ``put_new`` can be relied on. Raises CkptError."""
        with self._lock:
            known = self._conditional
        if known is None:
            known = self.store.probe_conditional()
            with self._lock:
                self._conditional = known
            event(_log, logging.INFO, "store.probed", run=self.key, conditional_put=known)
        self.probed.set()
        return known

    def begins_again(self) -> None:
        """Forget what was true of the run's life before: it was deleted in the store and begun again."""
        self.lending, self.known_groups = Lending(), KnownGroups()

    @property
    def _queues(self) -> tuple[WorkQueue, ...]:
        return self.uploads, self.control, self.deletions

    @property
    def has_work(self) -> bool:
        """Whether something is queued or running."""
        return any(len(queue) > 0 for queue in self._queues)

    def close(self, deadline: float) -> bool:
        """Stop all queues; False where a job outlasted ``deadline`` (then the store stays open)."""
        ended = [queue.close(deadline) for queue in self._queues]
        with self._lock:
            store = self._store
        if store is not None and all(ended):
            store.close()
        return all(ended)


class Runs:
    """Run key -> Run, as run.json files below the staging directory name them."""

    def __init__(
        self, staging: StagingDir, *, workers: int, clock: Clock, opener: StoreOpener = open_store
    ) -> None:
        self._staging = staging
        self._workers = workers
        self._clock = clock
        self._opener = opener
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}  # guarded by self._lock
        self._foreign: dict[str, Store] = {}  # guarded by self._lock; URLs that were only read

    def register(self, config: RunConfig) -> Run:
        """Make a run known, durably, and return it.

        Raises:
            InvalidInputError: bad URL, options or policy.
        """
        check_url(config.url)
        key = keys.run_key(config.url)
        if config.keep_local < 1:
            raise InvalidInputError("keep_local must be at least 1", keep_local=config.keep_local)
        if config.compression not in ("", *COMPRESSION):
            raise InvalidInputError(
                "not one of the allowed values",
                option="compression",
                value=config.compression,
                allowed=COMPRESSION,
            )
        check_options(config.store_options)
        # Opening touches nothing; a store that is down must not keep a trainer from starting.
        self._opener(config.url, config.store_options).close()
        self._staging.write_run_config(key, config)
        return self._adopt(key, config)

    def load(self, key: str) -> Run:
        """Return the run as its run.json says now: a trainer may write that file itself.

        Raises:
            NotFoundError: there is none.
            CorruptError: it is damaged.
        """
        return self._adopt(key, self._staging.read_run_config(key))

    def all(self) -> list[Run]:
        """The runs known so far, by key."""
        with self._lock:
            return [self._runs[key] for key in sorted(self._runs)]

    def by_url(self, url: str) -> Run | None:
        """The registered run at ``url``. Raises InvalidInputError for a malformed URL."""
        key = keys.run_key(url)
        try:
            return self.load(key)
        except NotFoundError:
            return None

    def store_for(self, url: str) -> Store:
        """The store of any run: with its own options where it is registered here, else with the server's
        environment. Raises CkptError.
        """
        run = self.by_url(url)
        if run is not None:
            return run.store
        url = url.rstrip("/")
        with self._lock:
            if url not in self._foreign:
                self._foreign[url] = self._opener(url, None)
            return self._foreign[url]

    def close(self, deadline: float) -> bool:
        """Stop every run's queues until ``deadline`` (monotonic). False: something still runs."""
        ended = [run.close(deadline) for run in self.all()]
        with self._lock:
            foreign = list(self._foreign.values())
        for store in foreign:
            try:
                store.close()
            except CkptError as error:
                event(_log, logging.WARNING, "store.close", url=store.url, error=error)
        return all(ended)

    def _adopt(self, key: str, config: RunConfig) -> Run:
        with self._lock:
            run = self._runs.get(key)
            if run is None:
                run = Run(key, config, opener=self._opener, workers=self._workers, clock=self._clock)
                self._runs[key] = run
                return run
        if run.config != config:
            run.reconfigure(config)
        return run
