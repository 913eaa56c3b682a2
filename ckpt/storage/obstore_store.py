"""s3:// gs:// az:// through obstore: Rust, no copy of the buffer, no GIL held while bytes move.

Traps that this file knows about: endpoints over plain http need ``allow_http``; ``timeout`` covers a whole
request, so it must outlast one part on the slowest acceptable link; a prefix means whole path components;
a range that ends behind the object is answered short without an error; the runtime does not survive a fork.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import obstore
from obstore import exceptions as oberr
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store

from ckpt.digest import Buffer
from ckpt.errors import (
    CkptError,
    ConflictError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from ckpt.storage.base import ObjectInfo
from ckpt.storage.conditional import probe_create
from ckpt.storage.parts import part_nbytes_for
from ckpt.storage.s3_config import ClientLimits, S3Config, split_bucket_url
from ckpt.storage.s3_keys import read_profile_keys

__all__ = ["ObstoreStore"]

_PAGE = 1000
_OS_ERROR = re.compile(r'message: "([^"]+)"')
_DENIED = ("status code: 401", "status code: 403", "ExpiredToken", "credential_process", "AWS profile")
_CREDENTIALS_LIFE = timedelta(minutes=5)
_runtime_pid: int | None = None


class ObstoreStore:
    """See the module and :class:`ckpt.storage.base.Store`. Safe for threads, not across a fork.

    Args:
        url: ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``.
        options: ``timeout_s`` (whole request), ``connect_timeout_s``, ``retries``; for s3 those of
            :mod:`ckpt.storage.s3_config`; any other is a configuration key of obstore for that service.

    Raises:
        InvalidInputError: a bad URL, an unknown option or a bad value.
    """

    def __init__(self, url: str, options: Mapping[str, str] | None = None) -> None:
        self._url = url.rstrip("/")
        self._conditional: bool | None = None
        rest = dict(options or {})
        limits = ClientLimits.take_from(rest)
        client: dict[str, Any] = {
            "timeout": timedelta(seconds=limits.timeout_s),
            "connect_timeout": timedelta(seconds=limits.connect_timeout_s),
        }
        retry = {"max_retries": limits.retries, "retry_timeout": timedelta(minutes=3)}
        try:
            self._store = _open(self._url, rest, client, retry)
        except (oberr.BaseError, ValueError, TypeError) as error:
            raise InvalidInputError(
                "the object store cannot be opened with these options", url=url, reason=_first_line(error)
            ) from error

    @property
    def url(self) -> str:
        return self._url

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        _check_fork()
        try:
            yield
        except (OSError, ValueError, TypeError, oberr.BaseError) as error:
            raise _translate(error, key, self._url) from error

    def put(self, key: str, data: Buffer) -> None:
        with self._errors(key), _absence_is_no_bucket(self._url):
            obstore.put(self._store, key, memoryview(data).cast("B"), use_multipart=False)

    def _create(self, key: str, data: Buffer) -> None:
        with self._errors(key), _absence_is_no_bucket(self._url):
            obstore.put(self._store, key, memoryview(data).cast("B"), use_multipart=False, mode="create")

    def put_new(self, key: str, data: Buffer) -> None:
        """Create ``key`` by a conditional put.

        Where the service ignores the condition (:meth:`probe_conditional`) this checks, then puts: it
        never knowingly overwrites, but two racers can both succeed.
        """
        if not self.probe_conditional():
            with contextlib.suppress(NotFoundError):
                self.head(key)
                raise ConflictError("the object exists", key=key, url=self._url)
            self.put(key, data)
            return
        self._create(key, data)

    def put_parts(
        self, key: str, pieces: Iterable[Buffer], *, most_nbytes: int, part_nbytes: int, concurrency: int
    ) -> None:
        """Upload in parts without copying: the engine refers to the pieces until they are sent."""
        part = part_nbytes_for(most_nbytes, part_nbytes)
        if most_nbytes <= part:
            few = list(pieces)
            self.put(key, few[0] if len(few) == 1 else b"".join(few))
            return
        failed: list[BaseException] = []

        def pulled() -> Iterator[memoryview]:
            # The engine calls this from its own thread, and turns what it raises into an error of its own.
            try:
                for piece in pieces:
                    yield memoryview(piece).cast("B")
            except BaseException as error:
                failed.append(error)
                raise

        try:
            with self._errors(key), _absence_is_no_bucket(self._url):
                obstore.put(
                    self._store,
                    key,
                    pulled(),
                    use_multipart=True,
                    chunk_size=part,
                    max_concurrency=concurrency,
                )
        except BaseException as error:
            if failed:
                raise failed[0] from None
            raise error

    def get(self, key: str) -> bytes:
        with self._errors(key):
            return bytes(obstore.get(self._store, key).bytes())

    def get_range(self, key: str, start: int, nbytes: int) -> Buffer:
        """Return a view of the engine's own buffer: no copy is made."""
        if start < 0 or nbytes < 0:
            raise InvalidInputError("a range must not be negative", key=key, start=start, nbytes=nbytes)
        if nbytes == 0:
            self._check_length(key, start)
            return b""
        try:
            with self._errors(key):
                data = memoryview(obstore.get_range(self._store, key, start=start, length=nbytes))
        except UnavailableError:
            # A range behind the end is "416", indistinguishable from other refusals: ask for the size.
            self._check_length(key, start + nbytes)
            raise
        if len(data) != nbytes:
            self._check_length(key, start + nbytes)
            raise UnavailableError("the service sent too few bytes", key=key, wanted=nbytes, got=len(data))
        return data

    def _check_length(self, key: str, end: int) -> None:
        nbytes = self.head(key).nbytes
        if nbytes < end:
            raise CorruptError(
                "the object is shorter than the range asked for",
                code="short-object",
                key=key,
                end=end,
                object_nbytes=nbytes,
            )

    def head(self, key: str) -> ObjectInfo:
        with self._errors(key):
            return _info(obstore.head(self._store, key))

    def list_keys(self, prefix: str, *, limit: int | None = None) -> Iterator[ObjectInfo]:
        """Yield as the contract says; pages of the service's size (1000 at Amazon), one request each."""
        folder, _, start = prefix.rpartition("/")
        # Everything above folder/start[:-1] includes everything that begins with folder/start.
        offset = f"{folder}/{start[:-1]}".lstrip("/") if len(start) > 1 else None
        size = _PAGE if limit is None else max(1, min(limit, _PAGE))
        with self._errors(prefix):
            pages = iter(obstore.list(self._store, folder or None, offset=offset, chunk_size=size))
        count, last = 0, ""
        while limit is None or count < limit:
            with self._errors(prefix):
                page = next(pages, None)
            if page is None:
                return
            for meta in page:
                info = _info(meta)
                if not info.key.startswith(prefix):
                    if info.key > prefix:
                        return
                    continue
                if info.key <= last:
                    raise InvalidInputError(
                        "the service does not list in byte order, which 'newest first' stands on",
                        code="unordered-listing",
                        url=self._url,
                        key=info.key,
                    )
                last = info.key
                yield info
                count += 1
                if limit is not None and count >= limit:
                    return

    def list_dirs(self, prefix: str) -> Iterator[str]:
        """Yield as the contract says; one request for each page of the service's folders and keys."""
        folder = prefix.rstrip("/")
        with self._errors(prefix):
            found = obstore.list_with_delimiter(self._store, folder or None)["common_prefixes"]
        # The engine's paths have no slash at the end.
        return iter(sorted((path.rstrip("/")[len(prefix) :] for path in found), key=lambda name: name + "/"))

    def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        if not wanted:
            return
        try:
            with self._errors(wanted[0]):
                obstore.delete(self._store, wanted)
        except NotFoundError:
            # GCS and Azure have no bulk delete that ignores absence: the first one missing ends it.
            for key in wanted:
                with contextlib.suppress(NotFoundError), self._errors(key):
                    obstore.delete(self._store, key)

    def probe_conditional(self) -> bool:
        if self._conditional is None:
            self._conditional = probe_create(self._create, self.delete)
        return self._conditional

    def close(self) -> None:
        """Connections belong to the engine's process-wide pool and are dropped with the last reference."""


def _open(url: str, rest: dict[str, str], client: dict[str, Any], retry: dict[str, Any]) -> ObjectStore:
    scheme = url.partition("://")[0]
    bucket, prefix = split_bucket_url(url)
    common: dict[str, Any] = {"client_options": client, "retry_config": retry}
    if prefix:
        common["prefix"] = prefix
    if scheme in ("s3", "s3a"):
        return _open_s3(bucket, rest, common)
    if any(value.startswith("http://") for value in rest.values()):
        client["allow_http"] = True  # an emulator
    config: Any = rest
    if scheme == "gs":
        return GCSStore(bucket, config=config, **common)
    if scheme == "az":
        return AzureStore(bucket, config=config, **common)
    raise InvalidInputError("obstore knows s3, gs and az", url=url)


def _open_s3(bucket: str, options: dict[str, str], common: dict[str, Any]) -> S3Store:
    s3 = S3Config.resolve(bucket, options)
    # TLS guards the bytes on their way, and every chunk has its own digest, checked whenever it is read.
    config: dict[str, Any] = {"unsigned_payload": True, "region": s3.region, **s3.rest}
    if s3.upload_checksum:
        config["checksum_algorithm"] = "sha256"
    config["virtual_hosted_style_request"] = s3.virtual_hosted
    if s3.endpoint_url is not None:
        scheme, _, host = s3.endpoint_url.partition("://")
        endpoint = f"{scheme}://{bucket}.{host}" if s3.virtual_hosted else s3.endpoint_url
        # Both names: the engine reads the environment too, and prefers the second.
        config["endpoint"] = config["aws_endpoint_url_s3"] = endpoint
        common["client_options"]["allow_http"] = scheme == "http"
    # A provider and not configuration keys: the engine would add a session token it finds in the environment.
    if s3.access_key_id is not None:
        common["credential_provider"] = lambda: {
            "access_key_id": s3.access_key_id,
            "secret_access_key": s3.secret_access_key,
            "token": s3.session_token,
            "expires_at": None,
        }
    elif s3.from_profile:
        common["credential_provider"] = _profile_credentials
    settings: Any = config
    return S3Store(bucket, config=settings, **common)


def _profile_credentials() -> Any:
    """The keys as the profile has them now; asked again every few minutes, so that renewal is seen."""
    keys = read_profile_keys()
    soon = datetime.now(UTC) + _CREDENTIALS_LIFE
    return {
        "access_key_id": keys.access_key_id,
        "secret_access_key": keys.secret_access_key,
        "token": keys.session_token,
        "expires_at": min(soon, keys.expires_at or soon),
    }


def _check_fork() -> None:
    """Refuse to hang: the engine's threads exist only in the process that used it first."""
    global _runtime_pid
    if _runtime_pid is None:
        _runtime_pid = os.getpid()
    elif _runtime_pid != os.getpid():
        raise InvalidInputError(
            "obstore was used before this process was forked and would hang; start processes by spawn",
            code="forked",
            pid=os.getpid(),
            parent=_runtime_pid,
        )


@contextlib.contextmanager
def _absence_is_no_bucket(url: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:  # what a put cannot find is the bucket
        raise InvalidInputError("the bucket does not exist", code="no-bucket", url=url) from error


def _translate(error: Exception, key: str, url: str) -> CkptError:
    text, reason = str(error), _first_line(error)
    if "NoSuchBucket" in text or "ContainerNotFound" in text:
        return InvalidInputError("the bucket does not exist", code="no-bucket", url=url)
    if isinstance(error, FileNotFoundError):
        return NotFoundError("no such object", key=key, url=url)
    if isinstance(error, oberr.AlreadyExistsError | oberr.PreconditionError):
        return ConflictError("the object exists", key=key, url=url)
    if isinstance(error, oberr.InvalidPathError | oberr.NotSupportedError | ValueError | TypeError):
        return InvalidInputError("the store cannot do this", key=key, url=url, reason=reason)
    if "kind: Connect" in text:
        # The engine's first line says only "error sending request"; why is deep in its debug text.
        cause = _OS_ERROR.search(text)
        return UnavailableError(
            "the object store cannot be reached",
            code="unreachable",
            url=url,
            reason=f"{reason}: {cause[1]}" if cause else reason,
        )
    if "BadDigest" in text:
        return UnavailableError(
            "the service received other bytes than were sent: damaged on the way",
            code="bad-digest",
            key=key,
            url=url,
        )
    denied = isinstance(error, oberr.PermissionDeniedError | oberr.UnauthenticatedError) or any(
        sign in text for sign in _DENIED
    )
    return UnavailableError(
        "access to the object store is denied" if denied else "the object store did not do it",
        code="denied" if denied else "unavailable",
        key=key,
        url=url,
        reason=reason,
    )


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).partition("Debug source")[0].split())[:500]


def _info(meta: Any) -> ObjectInfo:
    return ObjectInfo(key=meta["path"], nbytes=meta["size"], modified_at=meta["last_modified"].timestamp())
