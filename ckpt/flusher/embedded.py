"""Starting the staging server of this node as a child that outlives whoever starts it."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Mapping

from ckpt.events import event, get_logger
from ckpt.storage.logfile import open_log
from ckpt.storage.staging import StagingDir, os_errors

__all__ = ["start_embedded_server"]

_log = get_logger("flusher.embedded")
# Kept, so that they are reaped and Python does not warn about children that outlive their objects.
_children: list[subprocess.Popen[bytes]] = []


def start_embedded_server(staging: StagingDir, *, trainer_pid: int, environment: Mapping[str, str]) -> None:
    """Start the server unless one serves this staging directory. Returns at once.

    It has a session of its own and stays while a trainer lives or uploads are pending. A lock in the
    staging directory makes every start but the first leave quietly.

    Args:
        staging: of the node.
        trainer_pid: the process it is started for; the server stays at least as long as that lives.
        environment: of the child; must let it import ckpt_server and hold the store's credentials.

    Raises:
        UnavailableError: the process cannot be started.
    """
    for child in list(_children):
        if child.poll() is not None:
            _children.remove(child)
    command = [sys.executable, "-P", "-m", "ckpt_server", "--staging", str(staging.path), "--embedded"]
    log = staging.path / "server.log"
    with os_errors("the staging server cannot be started", staging=staging.path), open_log(log) as output:
        child = subprocess.Popen(
            [*command, "--trainer-pid", str(trainer_pid)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env=dict(environment),
            start_new_session=True,
        )
    _children.append(child)
    event(_log, logging.INFO, "server.started", pid=child.pid, log=log)
