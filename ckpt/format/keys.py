"""The one place that builds and parses object keys and the file names below a staging directory.

Object keys are relative to the run's URL. In ``attempts/`` and ``manifests/`` every name begins with
a descending number, so that the first key of a listing is the newest: a store can only list upwards,
and "latest" must not cost more requests the more checkpoints there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from ckpt.digest import digest, digest_hex
from ckpt.errors import CorruptError
from ckpt.format.ids import MAX_ATTEMPT, MAX_STEP, CheckpointId, split_run_url

__all__ = [
    "ATTEMPTS",
    "DATA",
    "INDEX",
    "LAYOUTS",
    "MANIFESTS",
    "PINS",
    "PROBE",
    "attempt_key",
    "borrows_key",
    "checkpoint_of_data_key",
    "checkpoint_of_index_key",
    "condemned_key",
    "condemned_prefix",
    "data_prefix",
    "group_key",
    "held_key",
    "index_prefix",
    "layout_key",
    "local_checkpoint_dir",
    "local_index_name",
    "local_layout_path",
    "local_segment_name",
    "local_uploaded_name",
    "manifest_key",
    "own_object_key",
    "pack_of",
    "parse_attempt_key",
    "parse_borrows_key",
    "parse_group_key",
    "parse_group_name",
    "parse_local_index_name",
    "parse_manifest_key",
    "parse_pin_key",
    "parse_temporary_pin_key",
    "pin_key",
    "require_below",
    "run_key",
    "segment_key",
    "segment_keys",
    "segment_of_data_key",
    "temporary_pin_key",
]

ATTEMPTS = "attempts/"
MANIFESTS = "manifests/"
DATA = "data/"
INDEX = "index/"
LAYOUTS = "layouts/"
PINS = "pins/"
PROBE = "probe/"

_MANIFEST = re.compile(r"manifests/\d{18}\.(\d{12}\.a\d{6})\.pb", re.ASCII)
_ATTEMPT = re.compile(r"attempts/\d{6}\.(\d{6})\.json", re.ASCII)
_GROUP = re.compile(r"index/(\d{12}\.a\d{6})/group-(\d{5})-of-(\d{5})\.pb", re.ASCII)
_INDEX = re.compile(
    r"index/(\d{12}\.a\d{6})/(?:(?:group|mark)-\d{5}-of-\d{5}\..+|borrows-.+\.pb|held\.pb|condemned-.+)",
    re.ASCII,
)
_GROUP_NAME = re.compile(r"group-(\d{5})-of-(\d{5})\.pb", re.ASCII)
_DATA = re.compile(r"data/[0-9a-f]{2}/(\d{12}\.a\d{6})/.+", re.ASCII)
_BORROWS = re.compile(r"index/(\d{12}\.a\d{6})/borrows-(\d{12}\.a\d{6})\.pb", re.ASCII)
_PACK = re.compile(r".+-([0-9a-f]{16})\.pack")
_PIN = re.compile(r"pins/(\d{12}\.a\d{6})", re.ASCII)
_TEMPORARY_PIN = re.compile(r"pins/(\d{12}\.a\d{6})\.[0-9a-f]{16}", re.ASCII)
_LOCAL_INDEX = re.compile(r"segment-(\d{5,})\.index", re.ASCII)


def attempt_key(attempt: int) -> str:
    """``attempts/999996.000003.json``: newest attempt first."""
    return f"{ATTEMPTS}{MAX_ATTEMPT - attempt:06d}.{attempt:06d}.json"


def parse_attempt_key(key: str) -> int | None:
    """Return the attempt number, or None for a foreign key."""
    match = _ATTEMPT.fullmatch(key)
    return int(match[1]) if match else None


def manifest_key(ident: CheckpointId) -> str:
    """``manifests/999996999999987999.000000012000.a000003.pb``: newest attempt, then highest step, first."""
    order = f"{MAX_ATTEMPT - ident.attempt:06d}{MAX_STEP - ident.step:012d}"
    return f"{MANIFESTS}{order}.{ident}.pb"


def parse_manifest_key(key: str) -> CheckpointId | None:
    """Return the checkpoint, or None for a foreign key."""
    match = _MANIFEST.fullmatch(key)
    return CheckpointId.parse(match[1]) if match else None


def index_prefix(ident: CheckpointId) -> str:
    """``index/<id>/``: where the group indexes of a checkpoint are."""
    return f"{INDEX}{ident}/"


def group_key(ident: CheckpointId, group: int, count: int) -> str:
    """``index/<id>/group-00002-of-00012.pb``."""
    return f"{INDEX}{ident}/group-{group:05d}-of-{count:05d}.pb"


def parse_group_key(key: str) -> tuple[CheckpointId, int, int] | None:
    """Return (checkpoint, group, count), or None for a foreign key."""
    match = _GROUP.fullmatch(key)
    return (CheckpointId.parse(match[1]), int(match[2]), int(match[3])) if match else None


def parse_group_name(name: str) -> tuple[int, int] | None:
    """Return (group, count) of a key without its :func:`index_prefix`, or None for a foreign one."""
    match = _GROUP_NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def checkpoint_of_index_key(key: str) -> CheckpointId | None:
    """Return the checkpoint whose group index or mark is at ``key``, or None for a foreign key."""
    match = _INDEX.fullmatch(key)
    return CheckpointId.parse(match[1]) if match else None


def segment_key(ident: CheckpointId, rank: int) -> str:
    """``data/<hh>/<id>/segment-00017.safetensors``; hh spreads the ranks over store partitions."""
    return segment_keys(ident, (rank,))[0]


def segment_keys(ident: CheckpointId, ranks: Iterable[int]) -> list[str]:
    """Return :func:`segment_key` of each rank; much quicker than one by one."""
    prefix = str(ident)
    names = [f"{prefix}/segment-{rank:05d}.safetensors" for rank in ranks]
    return [f"{DATA}{digest(name.encode())[0]:02x}/{name}" for name in names]


def own_object_key(key: str, pack: str) -> str:
    """Return where a segment's own object is: at its ``segment_key``, or beside it where it is packed.

    Args:
        key: of :func:`segment_key`.
        pack: 16 hex digits that say what was packed how; empty where the object is the segment itself.
    """
    return f"{key.removesuffix('.safetensors')}-{pack}.pack" if pack else key


def pack_of(key: str) -> str:
    """Return the ``pack`` of an object's key; empty where it has none."""
    match = _PACK.fullmatch(key)
    return match[1] if match else ""


def borrows_key(ident: CheckpointId, base: CheckpointId) -> str:
    """``index/<id>/borrows-<base>.pb``: what uploads of ``ident`` borrow by way of ``base``."""
    return f"{INDEX}{ident}/borrows-{base}.pb"


def parse_borrows_key(key: str) -> tuple[CheckpointId, CheckpointId] | None:
    """Return (checkpoint, base), or None for a foreign key."""
    match = _BORROWS.fullmatch(key)
    return (CheckpointId.parse(match[1]), CheckpointId.parse(match[2])) if match else None


def held_key(ident: CheckpointId) -> str:
    """``index/<id>/held.pb``: objects that outlived their checkpoint."""
    return f"{INDEX}{ident}/held.pb"


def condemned_prefix(ident: CheckpointId) -> str:
    """``index/<id>/condemned-``: before every :func:`condemned_key` of a checkpoint."""
    return f"{INDEX}{ident}/condemned-"


def condemned_key(ident: CheckpointId, token: str) -> str:
    """``index/<id>/condemned-<token>``: somebody is about to delete the checkpoint; 16 hex digits say who."""
    return f"{condemned_prefix(ident)}{token}"


def data_prefix(ident: CheckpointId, rank: int) -> str:
    """The folder of :func:`segment_key`."""
    return segment_key(ident, rank).rpartition("/")[0] + "/"


def checkpoint_of_data_key(key: str) -> CheckpointId | None:
    """Return the checkpoint whose segment is at ``key``, or None for a foreign key."""
    match = _DATA.fullmatch(key)
    return CheckpointId.parse(match[1]) if match else None


def segment_of_data_key(key: str) -> str | None:
    """Return the key of the segment that the object at ``key`` has chunks of; None for a foreign key."""
    match = _PACK.fullmatch(key)
    whole = f"{match[0][: match.start(1) - 1]}.safetensors" if match else key
    return whole if _DATA.fullmatch(whole) and whole.endswith(".safetensors") else None


def layout_key(layout_digest: bytes) -> str:
    """``layouts/<32 hex digits>.pb``: content-addressed."""
    return f"{LAYOUTS}{layout_digest.hex()}.pb"


def pin_key(ident: CheckpointId) -> str:
    """``pins/<id>``."""
    return f"{PINS}{ident}"


def parse_pin_key(key: str) -> CheckpointId | None:
    """Return the pinned checkpoint, or None for a foreign key."""
    match = _PIN.fullmatch(key)
    return CheckpointId.parse(match[1]) if match else None


def temporary_pin_key(ident: CheckpointId, token: str) -> str:
    """``pins/<id>.<token>``: somebody needs the checkpoint for a moment; 16 hex digits say who."""
    return f"{pin_key(ident)}.{token}"


def parse_temporary_pin_key(key: str) -> CheckpointId | None:
    """Return the checkpoint, or None for a foreign key."""
    match = _TEMPORARY_PIN.fullmatch(key)
    return CheckpointId.parse(match[1]) if match else None


def run_key(url: str) -> str:
    """Folder of a run below ``<staging>/runs/``: its name and a hash of its whole URL.

    Two runs of one name under different roots stay apart.
    """
    _, run = split_run_url(url)
    return f"{run}-{digest_hex(url.rstrip('/').encode())[:12]}"


def local_checkpoint_dir(ident: CheckpointId) -> str:
    """Folder of a checkpoint below ``runs/<run_key>/``."""
    return str(ident)


def local_segment_name(rank: int) -> str:
    return f"segment-{rank:05d}.safetensors"


def local_index_name(rank: int) -> str:
    """The sealed marker: written only after the segment of this rank is durable."""
    return f"segment-{rank:05d}.index"


def local_uploaded_name(rank: int) -> str:
    """Written only after the segment's object is complete in the store."""
    return f"segment-{rank:05d}.uploaded"


def parse_local_index_name(name: str) -> int | None:
    """Return the rank of a sealed marker, or None for any other file name."""
    match = _LOCAL_INDEX.fullmatch(name)
    return int(match[1]) if match else None


def local_layout_path(layout_digest: bytes) -> str:
    """Path of a layout below ``runs/<run_key>/``."""
    return f"layouts/{layout_digest.hex()}.pb"


def require_below(key: str) -> str:
    """Return ``key`` unless it could leave its folder. Raises CorruptError."""
    path = PurePosixPath(key)
    if path.is_absolute() or ".." in path.parts or not key:
        raise CorruptError("a stored key points outside its run", key=key)
    return key
