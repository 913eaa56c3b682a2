"""``python -m ckpt.flusher``: started by a trainer, one per rank; not meant to be typed."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import socket

from ckpt.clock import SystemClock
from ckpt.flusher.control import Flusher, FlusherSettings
from ckpt.flusher.detach import detach

__all__ = ["main"]


def main() -> None:
    """Run a flusher until its trainer has closed or died."""
    parser = argparse.ArgumentParser(prog="ckpt.flusher", description="Seals snapshots of one trainer.")
    parser.add_argument("--control-fd", type=int, required=True, help="SOCK_SEQPACKET to the trainer")
    parser.add_argument("--staging", required=True, help="staging directory, absolute")
    parser.add_argument("--run-key", required=True, help="folder of the run below runs/")
    parser.add_argument("--server", required=True, help="gRPC target of the staging server")
    parser.add_argument("--threads", type=int, default=4, help="chunks written at once")
    parser.add_argument("--close-timeout", type=float, default=3600.0, help="seconds to wait for outcomes")
    parser.add_argument("--orphan-timeout", type=float, default=20.0, help="seconds to try an absent server")
    parser.add_argument("--trainer-pid", type=int, default=0, help="process whose death ends this one")
    parser.add_argument("--pulse-fd", type=int, help="shared memory that shows how the trainer is doing")
    parser.add_argument("--stacks-fd", type=int, help="file to which the trainer writes its stacks")
    parser.add_argument("--start-server", action="store_true", help="start a server where none answers")
    options = parser.parse_args()
    shared = {fd for fd in (options.pulse_fd, options.stacks_fd) if fd is not None}
    detach(keep_fds={options.control_fd, *shared})
    faulthandler.enable()
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {os.getpid()} %(levelname)s %(name)s %(message)s"
    )
    settings = FlusherSettings(
        staging=options.staging,
        run_key=options.run_key,
        server=options.server,
        threads=options.threads,
        close_timeout_s=options.close_timeout,
        orphan_timeout_s=options.orphan_timeout,
        trainer_pid=options.trainer_pid,
        starts_server=options.start_server,
        pulse_fd=options.pulse_fd,
        stacks_fd=options.stacks_fd,
    )
    Flusher(settings, socket.socket(fileno=options.control_fd), SystemClock()).run()


if __name__ == "__main__":
    main()
