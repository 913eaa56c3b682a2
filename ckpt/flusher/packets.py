"""Receiving on the socket between trainer and flusher (unix, SOCK_SEQPACKET); both ends use it."""

from __future__ import annotations

import array
import socket
from typing import NamedTuple

__all__ = ["Packet", "receive"]

_FDS_MAX = 4


class Packet(NamedTuple):
    """One packet.

    Attributes:
        data: never empty.
        fds: descriptors that came with it; the receiver closes them.
        whole: False if the kernel cut the data or the descriptors.
    """

    data: bytes
    fds: list[int]
    whole: bool


def receive(end: socket.socket, nbytes_max: int) -> Packet | None:
    """Return the next packet of at most ``nbytes_max`` bytes, or None if none can ever come. Does not block.

    Raises:
        BlockingIOError: none is there now.
    """
    while True:
        try:
            # Not socket.recv_fds: it drops the flags it is given, and would block.
            data, ancillary, flags, _ = end.recvmsg(
                nbytes_max,
                socket.CMSG_SPACE(_FDS_MAX * array.array("i").itemsize),
                socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC,
            )
        except BlockingIOError:
            raise
        except ConnectionResetError:
            # Said once, and before what the peer had sent: it died with something of ours unread.
            continue
        except OSError:
            return None
        fds = array.array("i")
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        return Packet(data, list(fds), not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)) if data else None
