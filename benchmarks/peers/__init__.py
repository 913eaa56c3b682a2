"""The libraries that are measured side by side, each behind the same few calls."""

from __future__ import annotations

import importlib.util
import sys

from benchmarks.peers.base import Peer
from benchmarks.peers.native import NATIVE
from benchmarks.peers.others import NVRX_FOLDER, OTHERS
from benchmarks.peers.ours import NO_LIBRARY, OURS, StoreOnly, ToObjectStore

__all__ = ["PEERS", "SAVERS", "Peer", "make_importable", "missing"]

# By title. SAVERS differ in how they save; others in where they save to or restore from.
SAVERS: dict[str, type[Peer]] = {each.title: each for each in (*NO_LIBRARY, *OURS, *NATIVE, *OTHERS)}
PEERS: dict[str, type[Peer]] = {**SAVERS, **{each.title: each for each in (StoreOnly, ToObjectStore)}}


def make_importable() -> None:
    """Extend the import path by what the bench environment keeps apart."""
    if NVRX_FOLDER.is_dir() and str(NVRX_FOLDER) not in sys.path:
        sys.path.append(str(NVRX_FOLDER))


def missing(peer: type[Peer]) -> list[str]:
    """Return what would have to be installed for ``peer``."""
    make_importable()
    return [name for name in peer.needs if importlib.util.find_spec(name) is None]
