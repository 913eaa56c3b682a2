"""Several nodes on this machine: a real staging server each, with its own directory and failure domain."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ckpt.client import StagingClient
from ckpt.errors import NotFoundError
from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.format.peer import PeerNode
from ckpt.storage.peerfile import read_peer_file, replicas_dir
from ckpt.storage.staging import RunConfig, StagingDir
from tests.support.sealing import World, seal
from tests.support.server import Server, eventually

__all__ = ["Cluster", "cluster"]

# Short times, so that tests need not wait for a node to count as lost.
QUICK = ("--peer-lost", "1.2", "--adopt-after", "2.5")
PLAIN = ("--insecure", "--peer-listen", "127.0.0.1:0")


class Cluster:
    """Nodes 0, 1, ... each with the ranks of its group in ``world``.

    Args:
        folder: for the directories of the nodes.
        url: of the run.
        world: what is saved; one group per node.
        domains: failure domain of each node.
        arguments: more of each server's command line.
        environments: added to the environment of each server; missing ones are empty.
        listen: how each server is reached.
    """

    def __init__(
        self,
        folder: Path,
        url: str,
        world: World,
        *,
        domains: Sequence[str],
        arguments: Sequence[str] = (),
        environments: Sequence[Mapping[str, str]] = (),
        listen: Sequence[str] = PLAIN,
    ) -> None:
        self.url = url
        self.run_key = keys.run_key(url)
        self.world = world
        self.servers = [
            Server(
                folder / f"node{number}",
                *(*QUICK, *listen, "--failure-domain", domain, *arguments),
                environment=environment,
            )
            for number, (domain, environment) in enumerate(zip_longest(domains, environments, fillvalue={}))
        ]

    def start(self) -> Cluster:
        for server in self.servers:
            server.spawn()
        for server in self.servers:
            eventually(server.info, what="server is ready")
        return self

    def peers(self) -> tuple[PeerNode, ...]:
        """The nodes as a session would gather them."""
        found = []
        for server, ranks in zip_longest(self.servers, self.world.groups, fillvalue=()):
            node = read_peer_file(server.staging)
            assert node is not None, server.log()
            found.append(replace(node, ranks=tuple(ranks)))
        return tuple(found)

    def configure(self, *, nodes: Sequence[int] | None = None, factor: int = 2, **more: Any) -> None:
        """Write run.json as the start of a job on ``nodes`` (default: all) would."""
        chosen = list(range(len(self.servers))) if nodes is None else list(nodes)
        peers = more.pop("peers", None) or tuple(self.peers()[n] for n in chosen)
        config = RunConfig(url=self.url, peers=peers, replication_factor=factor, **more)
        for number in chosen:
            self.servers[number].staging.write_run_config(self.run_key, config)

    def configure_again(self, **changes: Any) -> None:
        """Change run.json on every node that has one; works also while servers are down."""
        for server in self.servers:
            with contextlib.suppress(NotFoundError):
                config = server.staging.read_run_config(self.run_key)
                server.staging.write_run_config(self.run_key, replace(config, **changes))

    def seal(self, ident: CheckpointId, *nodes: int) -> None:
        """Seal the segments of ``nodes`` (default: all), and tell their servers."""
        for number in nodes or range(len(self.servers)):
            server = self.servers[number]
            with StagingClient(server.target) as client:
                for rank in self.world.groups[number]:
                    seal(server.staging, self.run_key, ident, self.world, rank)
                    client.seal(self.run_key, ident, rank)

    def replicas(self, number: int) -> StagingDir:
        """The replicas that node ``number`` keeps."""
        return replicas_dir(self.servers[number].staging)

    def held(self, number: int, ident: CheckpointId) -> list[int]:
        """Ranks whose replica of ``ident`` node ``number`` keeps."""
        return self.replicas(number).sealed_ranks(self.run_key, ident)

    def lose(self, number: int) -> None:
        """The node is gone, with its disk."""
        self.servers[number].kill()
        shutil.rmtree(self.servers[number].staging.path)


@contextlib.contextmanager
def cluster(
    folder: Path,
    url: str,
    world: World,
    *,
    domains: Sequence[str],
    arguments: Sequence[str] = (),
    environments: Sequence[Mapping[str, str]] = (),
    listen: Sequence[str] = PLAIN,
) -> Iterator[Cluster]:
    """Run the nodes for the block (see :class:`Cluster`); nothing of them is left afterwards."""
    nodes = Cluster(
        folder, url, world, domains=domains, arguments=arguments, environments=environments, listen=listen
    )
    with contextlib.ExitStack() as stack:
        for server in nodes.servers:
            stack.push(server.__exit__)
        yield nodes.start()
