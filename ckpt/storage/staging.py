"""The staging directory of a node: names, small durable files, and what their presence means.

Trainer, flusher and server share it. Its tree is described in docs/format.md. Three facts hold at
any moment, also after a crash:

SD1 ``segment-<rank>.index`` exists only if the segment and the layout it names are durable.
SD2 ``segment-<rank>.uploaded`` exists only if the segment's object is complete in the store.
SD3 ``committed`` exists only if the manifest exists in the store.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt.clock import random_bytes
from ckpt.digest import Buffer, digest, digest_hex
from ckpt.errors import CorruptError, InvalidInputError, NotFoundError, UnavailableError
from ckpt.format import keys
from ckpt.format.envelope import Kind, open_envelope, open_message, seal_message
from ckpt.format.ids import CheckpointId
from ckpt.format.limits import MALFORMED, load_json
from ckpt.format.peer import PeerNode
from ckpt.storage.durable import TEMP_PREFIX, fsync_dir, make_dirs, os_error, sync_names, write_durably
from ckpt.storage.own_file import check_own_directory, open_own
from ckpt_proto.v1 import disk_pb2, staging_pb2

__all__ = ["ARRIVING", "COMMITTED_NAME", "RunConfig", "StagingDir", "default_staging_path", "os_errors"]

ARRIVING = ".incoming"
"""Ends the names of a segment that arrives, and of the index that says what is expected."""

COMMITTED_NAME = "committed"
_ENDED_NAME = "ended"
_MODE = 0o700  # of every folder below the staging directory
_RUN_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,159}")
# Whole numbers of run.json, with what a file of an older version means that lacks them.
_COUNTS = {
    "keep_local": 2,
    "keep_last": 0,
    "keep_every": 0,
    "replication_factor": 1,
    "replication_jump": 0,
    "replication_rate": 0,
}
_WIDE = ("keep_every", "replication_rate")  # 64 bits wide on the wire
_SOCKET_PATH_MAX = 100  # bytes; sockaddr_un holds 108 with its terminator, gRPC adds a little


def default_staging_path() -> Path:
    """Return ``$CKPT_STAGING``, or ``~/.cache/ckpt/staging``."""
    configured = os.environ.get("CKPT_STAGING")
    return Path(configured) if configured else Path.home() / ".cache" / "ckpt" / "staging"


@contextlib.contextmanager
def os_errors(message: str, **context: object) -> Iterator[None]:
    """Turn an OSError of the block into a CkptError that says ``message`` and ``context``.

    Raises:
        NotFoundError, ConflictError, UnavailableError: as :func:`ckpt.storage.durable.os_error` says;
            code "no-space" also where a limit on the size of files is reached.
    """
    try:
        yield
    except OSError as error:
        found = os_error(error, "")
        # EFBIG: a limit on the size of files, which to the caller is a full disk.
        code = "no-space" if error.errno == errno.EFBIG else found.code
        reason = error.strerror or str(error)
        name = errno.errorcode.get(error.errno or 0, "")
        raise type(found)(message, code=code, **context, errno=name, reason=reason) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What a server must know about a run before it can upload anything of it.

    Attributes:
        url: the run's URL; its last component is the run name.
        store_options: options of :func:`ckpt.storage.open.open_store`; never a secret.
        keep_local: newest committed steps kept in the staging directory.
        keep_last: newest checkpoints kept in the store; 0 keeps all.
        keep_every: also keep steps divisible by this; 0 switches the rule off.
        compression: of uploads: "auto", "on", "off"; empty: as the server has it.
        peers: every node of the newest start of the run, this one among them, by smallest rank.
        replication_factor: copies of a sealed segment on NVMe, its own included; 1: no replicas.
        replication_jump: distance of the copies in nodes; 0 lets the failure domains decide.
        replication_rate: bytes per second that the server sends to other nodes, in all; 0: no limit.
    """

    url: str
    store_options: Mapping[str, str] = field(default_factory=dict)
    keep_local: int = 2
    keep_last: int = 0
    keep_every: int = 0
    compression: str = ""
    peers: tuple[PeerNode, ...] = ()
    replication_factor: int = 1
    replication_jump: int = 0
    replication_rate: int = 0

    def to_proto(self) -> staging_pb2.RunConfig:
        return staging_pb2.RunConfig(
            url=self.url,
            store_options=self.store_options,
            keep_local=self.keep_local,
            keep_last=self.keep_last,
            keep_every=self.keep_every,
            compression=self.compression,
            peers=[peer.to_proto() for peer in self.peers],
            replication_factor=self.replication_factor,
            replication_jump=self.replication_jump,
            replication_rate=self.replication_rate,
        )

    @classmethod
    def from_proto(cls, message: staging_pb2.RunConfig) -> RunConfig:
        """Build from the wire; ``keep_local`` 0 there means the default."""
        return cls(
            url=message.url,
            store_options=dict(message.store_options),
            keep_local=message.keep_local or 2,
            keep_last=message.keep_last,
            keep_every=message.keep_every,
            compression=message.compression,
            peers=tuple(PeerNode.from_proto(peer) for peer in message.peers),
            replication_factor=message.replication_factor or 1,
            replication_jump=message.replication_jump,
            replication_rate=message.replication_rate,
        )

    def to_json(self) -> bytes:
        """Return the bytes of ``run.json``: sorted keys, so equal configurations are equal bytes."""
        body: dict[str, Any] = {name: getattr(self, name) for name in ("url", "compression", *_COUNTS)}
        body["store_options"] = dict(self.store_options)
        body["peers"] = [peer.to_json() for peer in self.peers]
        return (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()

    @classmethod
    def from_json(cls, data: Buffer, *, where: str) -> RunConfig:
        """Parse :meth:`to_json`. Raises CorruptError; unknown keys are left for newer versions."""
        try:
            body: dict[str, Any] = load_json(data)
            return cls(
                url=str(body["url"]),
                store_options={str(k): str(v) for k, v in body.get("store_options", {}).items()},
                compression=str(body.get("compression", "")),
                peers=tuple(PeerNode.from_json(peer) for peer in body.get("peers", [])),
                **{name: _count(name, body.get(name, default)) for name, default in _COUNTS.items()},
            )
        except MALFORMED as error:
            raise CorruptError("run.json cannot be read", code="decode", where=where) from error


def _count(name: str, value: Any) -> int:
    number = int(value)
    if not 0 <= number < 1 << (63 if name in _WIDE else 32):
        raise ValueError(name)
    return number


class StagingDir:
    """A staging directory. Holds no state: every call looks at the file system.

    Every method may raise UnavailableError (codes "no-space", "denied", "unavailable") and, where a path
    is built from a run key that came from elsewhere, InvalidInputError. Methods may be called from any
    thread and from several processes; writers of one file replace it whole.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    def __repr__(self) -> str:
        return f"StagingDir({str(self.path)!r})"

    # --- the directory itself ---

    def ensure(self) -> StagingDir:
        """Create the directory (mode 0700) and its token where they are missing; return self.

        Raises:
            InvalidInputError: code "staging-unsafe": others can write in it.
        """
        with os_errors("the staging directory cannot be created", path=self.path):
            make_dirs(self.path.parent)
            make_dirs(self.path, mode=_MODE)
            check_own_directory(self.path)
            make_dirs(self.path / "runs", mode=_MODE)
        self.token()
        return self

    def token(self) -> bytes:
        """Return the content of ``token``, created on first use: equal tokens mean one directory."""
        path = self.path / "token"
        with os_errors("the staging directory has no token and none can be created", path=path):
            with contextlib.suppress(FileNotFoundError):
                return path.read_bytes()
            own = path.with_name(f"{TEMP_PREFIX}{random_bytes(12).hex()}")
            write_durably(own, random_bytes(16).hex().encode())
            # A link, not a rename: of two processes that start together one wins and both read its token.
            with contextlib.suppress(FileExistsError):
                os.link(own, path)
            own.unlink(missing_ok=True)
            fsync_dir(self.path)
            return path.read_bytes()

    def socket_path(self) -> Path:
        """Path of the server's unix socket; elsewhere where it would not fit in a socket address."""
        path = self.path / "server.sock"
        if len(os.fsencode(path)) <= _SOCKET_PATH_MAX:
            return path
        name = f"ckpt-{os.getuid()}-{digest_hex(os.fsencode(self.path))[:12]}.sock"
        return Path(tempfile.gettempdir()) / name

    def socket_target(self) -> str:
        """gRPC target of the node's server: ``unix:/...``."""
        return f"unix:{self.socket_path()}"

    # --- runs ---

    def trainers_path(self) -> Path:
        """Folder with a file per trainer that counts on an embedded server, named by its process id."""
        return self.path / "trainers"

    def forget_trainer(self, pid: int) -> None:
        """Note that the process ``pid`` needs no embedded server any more. No error if it never did."""
        with os_errors("the trainer cannot be forgotten", staging=self.path):
            (self.trainers_path() / str(pid)).unlink(missing_ok=True)

    def run_dir(self, run_key: str) -> Path:
        """Folder of a run. Raises InvalidInputError for a key that is no plain file name."""
        if _RUN_KEY.fullmatch(run_key) is None:
            raise InvalidInputError("not a run key", run_key=run_key)
        return self.path / "runs" / run_key

    def run_keys(self) -> list[str]:
        """Keys of the runs that have a ``run.json``, ascending."""
        return [name for name in self._names(self.path / "runs") if self._is_run(name)]

    def write_run_config(self, run_key: str, config: RunConfig) -> None:
        """Make the run known, durably. An unchanged file is left alone."""
        data = config.to_json()
        path = self.run_dir(run_key) / "run.json"
        with os_errors("run.json cannot be written", path=path):
            with contextlib.suppress(FileNotFoundError):
                if path.read_bytes() == data:
                    sync_names(path)
                    return
            make_dirs(path.parent, mode=_MODE)
            write_durably(path, data)

    def read_run_config(self, run_key: str) -> RunConfig:
        """Return what :meth:`write_run_config` stored. Raises NotFoundError, CorruptError."""
        path = self.run_dir(run_key) / "run.json"
        return RunConfig.from_json(self._read(path, "the run is not known here"), where=str(path))

    def mark_ended(self, run_key: str) -> None:
        """Note durably that the run has ended in order on this node: nobody will come back for its steps."""
        path = self.run_dir(run_key) / _ENDED_NAME
        with os_errors("the end of a run cannot be noted", path=path):
            make_dirs(path.parent, mode=_MODE)
            write_durably(path, b"")

    def clear_ended(self, run_key: str) -> None:
        """Take :meth:`mark_ended` back: the run goes on. No error where there is no mark."""
        path = self.run_dir(run_key) / _ENDED_NAME
        with os_errors("the note of a run's end cannot be removed", path=path):
            path.unlink(missing_ok=True)

    def is_ended(self, run_key: str) -> bool:
        """Whether the run has ended in order on this node."""
        path = self.run_dir(run_key) / _ENDED_NAME
        with os_errors("the note of a run's end cannot be looked for", path=path):
            return path.is_file()

    def layout(self, run_key: str, layout_digest: bytes) -> bytes:
        """Return a LayoutSet's bytes. Raises NotFoundError; CorruptError where the digest differs."""
        path = self.run_dir(run_key) / keys.local_layout_path(layout_digest)
        payload = bytes(open_envelope(Kind.LAYOUT_SET, self._read(path, "layout not found"), where=str(path)))
        if digest(payload) != layout_digest:
            raise CorruptError("layout does not match its name", code="digest", where=path)
        return payload

    def write_layout(self, run_key: str, layout_digest: bytes, payload: Buffer) -> None:
        """Store a LayoutSet's bytes durably under its digest. Idempotent; mends a damaged file.

        Raises:
            InvalidInputError: ``layout_digest`` is not the digest of ``payload``.
        """
        if digest(payload) != layout_digest:
            raise InvalidInputError("layout does not match its digest", digest=layout_digest.hex())
        path = self.run_dir(run_key) / keys.local_layout_path(layout_digest)
        with os_errors("a layout cannot be written", path=path):
            with contextlib.suppress(NotFoundError, CorruptError):
                self.layout(run_key, layout_digest)
                sync_names(path)  # whoever wrote it may have died before it had done so
                return
            make_dirs(path.parent, mode=_MODE)
            write_durably(path, seal_message(Kind.LAYOUT_SET, bytes(payload)))

    # --- checkpoints ---

    def checkpoint_dir(self, run_key: str, ident: CheckpointId) -> Path:
        return self.run_dir(run_key) / keys.local_checkpoint_dir(ident)

    def make_checkpoint_dir(self, run_key: str, ident: CheckpointId) -> Path:
        """Create the folder of a checkpoint so that its name survives a power cut; return it."""
        path = self.checkpoint_dir(run_key, ident)
        with os_errors("the folder of a checkpoint cannot be created", path=path):
            make_dirs(path, mode=_MODE)
        return path

    def checkpoints(self, run_key: str) -> list[CheckpointId]:
        """Return every checkpoint that has a folder, ascending by step, then attempt; sealed or not."""
        found = []
        for name in self._names(self.run_dir(run_key)):
            with contextlib.suppress(InvalidInputError):
                found.append(CheckpointId.parse(name))
        return sorted(found)

    def changed_at_ns(self, run_key: str, ident: CheckpointId) -> int | None:
        """Return when a name last came into the folder or left it, in ns; None: there is no folder."""
        path = self.checkpoint_dir(run_key, ident)
        with os_errors("the folder of a checkpoint cannot be looked at", path=path):
            with contextlib.suppress(FileNotFoundError):
                return path.stat().st_mtime_ns
            return None

    def sealed_checkpoints(self, run_key: str) -> set[CheckpointId]:
        """Those of which at least one segment is sealed here."""
        return {ident for ident in self.checkpoints(run_key) if self.sealed_ranks(run_key, ident)}

    def sealed_ranks(self, run_key: str, ident: CheckpointId) -> list[int]:
        """Return the ranks whose segment is sealed here, ascending."""
        names = self._names(self.checkpoint_dir(run_key, ident))
        return sorted(rank for name in names if (rank := keys.parse_local_index_name(name)) is not None)

    def segment_path(self, run_key: str, ident: CheckpointId, rank: int) -> Path:
        return self.checkpoint_dir(run_key, ident) / keys.local_segment_name(rank)

    def segment_tmp_path(self, run_key: str, ident: CheckpointId, rank: int) -> Path:
        """Where a segment is while it is being written; debris unless somebody is writing it."""
        return self.checkpoint_dir(run_key, ident) / f"{keys.local_segment_name(rank)}.tmp"

    def index_path(self, run_key: str, ident: CheckpointId, rank: int) -> Path:
        return self.checkpoint_dir(run_key, ident) / keys.local_index_name(rank)

    def uploaded_path(self, run_key: str, ident: CheckpointId, rank: int) -> Path:
        return self.checkpoint_dir(run_key, ident) / keys.local_uploaded_name(rank)

    def write_index(
        self, run_key: str, ident: CheckpointId, rank: int, index: disk_pb2.SegmentIndex | bytes
    ) -> None:
        """Write the sealed marker, durably.

        The caller has made the segment and the layout durable before (SD1). ``index`` is the message,
        or the bytes of a whole envelope as another node sealed it.
        """
        data = index if isinstance(index, bytes) else seal_message(Kind.SEGMENT_INDEX, index)
        path = self.index_path(run_key, ident, rank)
        with os_errors("a segment index cannot be written", path=path):
            write_durably(path, data)

    def read_index_bytes(self, run_key: str, ident: CheckpointId, rank: int) -> bytes:
        """Return the index file as it is, envelope included, unverified. Raises NotFoundError."""
        return self._read(
            self.index_path(run_key, ident, rank), "this rank has not sealed this checkpoint here"
        )

    def read_index(self, run_key: str, ident: CheckpointId, rank: int) -> disk_pb2.SegmentIndex:
        """Return the verified index of a sealed segment.

        Raises:
            NotFoundError: not sealed here.
            CorruptError: damaged, or it belongs to another rank or checkpoint.
        """
        where = str(self.index_path(run_key, ident, rank))
        data = self.read_index_bytes(run_key, ident, rank)
        index = open_message(Kind.SEGMENT_INDEX, data, disk_pb2.SegmentIndex(), where=where)
        if index.rank != rank or (index.id.step, index.id.attempt) != (ident.step, ident.attempt):
            raise CorruptError("index belongs to another segment", code="mismatch", where=where)
        return index

    def mark_uploaded(
        self, run_key: str, ident: CheckpointId, rank: int, record: disk_pb2.UploadRecord
    ) -> None:
        """Note durably that the segment's object is complete in the store (SD2)."""
        path = self.uploaded_path(run_key, ident, rank)
        with os_errors("an upload record cannot be written", path=path):
            write_durably(path, seal_message(Kind.UPLOAD_RECORD, record))

    def read_uploaded(self, run_key: str, ident: CheckpointId, rank: int) -> disk_pb2.UploadRecord | None:
        """Return the upload record, or None where there is none. Raises CorruptError."""
        path = self.uploaded_path(run_key, ident, rank)
        try:
            data = self._read(path, "not uploaded")
        except NotFoundError:
            return None
        return open_message(Kind.UPLOAD_RECORD, data, disk_pb2.UploadRecord(), where=str(path))

    def mark_committed(self, run_key: str, ident: CheckpointId) -> None:
        """Note durably that the manifest exists in the store (SD3)."""
        path = self.checkpoint_dir(run_key, ident) / COMMITTED_NAME
        with os_errors("the committed marker cannot be written", path=path):
            write_durably(path, b"")

    def is_committed(self, run_key: str, ident: CheckpointId) -> bool:
        path = self.checkpoint_dir(run_key, ident) / COMMITTED_NAME
        with os_errors("the committed marker cannot be looked for", path=path):
            return path.is_file()

    def unseal(self, run_key: str, ident: CheckpointId) -> None:
        """Remove the sealed markers of a checkpoint, durably, so that its segments may change or go (SD1)."""
        path = self.checkpoint_dir(run_key, ident)
        with os_errors("a checkpoint cannot be unsealed", path=path):
            for rank in self.sealed_ranks(run_key, ident):
                self.index_path(run_key, ident, rank).unlink(missing_ok=True)
            fsync_dir(path)

    def remove_checkpoint(self, run_key: str, ident: CheckpointId) -> None:
        """Delete the folder of a checkpoint. One that is not there is no error.

        Sealed markers go first, so that a crash in the middle leaves unsealed debris and never a
        marker without its segment (SD1). A reader that has a segment open keeps it.
        """
        path = self.checkpoint_dir(run_key, ident)
        with os_errors("the folder of a checkpoint cannot be removed", path=path):
            if not path.is_dir():
                return
            self.unseal(run_key, ident)
            shutil.rmtree(path)
            fsync_dir(path.parent)

    # --- inside ---

    def _is_run(self, name: str) -> bool:
        return _RUN_KEY.fullmatch(name) is not None and (self.run_dir(name) / "run.json").is_file()

    def _read(self, path: Path, missing: str) -> bytes:
        try:
            with os.fdopen(open_own(self.path, path), "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFoundError(missing, path=path) from error
        except OSError as error:
            raise UnavailableError(
                "a staged file cannot be read", code="unavailable", path=path, reason=error
            ) from error

    def _names(self, path: Path) -> list[str]:
        try:
            return sorted(entry.name for entry in path.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:  # an error is not "nothing there"
            raise UnavailableError(
                "a staging folder cannot be listed", code="unavailable", path=path
            ) from error
