"""The one interface behind every command, and the choice between its two implementations.

``DirectBackend`` opens the store itself; ``RemoteBackend`` asks a staging server. Each is imported only
when chosen: gRPC or a store engine costs more start-up time than the rest of the command.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ckpt.errors import CkptError, InvalidInputError

if TYPE_CHECKING:
    from ckpt.cli.options import ServerOptions, StoreOptions
    from ckpt.cli.records import Details, Listing, Policy, PrunePlan, Repair, RunRow, Shown, Sweep, Verified

__all__ = ["Backend", "OnBytes", "OnDeleted", "OnSwept", "open_backend", "read_token"]

OnBytes: TypeAlias = Callable[[int, int], None]
"""Called with (bytes checked, bytes in all)."""

OnDeleted: TypeAlias = Callable[[int], None]
"""Called with the number of checkpoints that were deleted since the last call."""

OnSwept: TypeAlias = Callable[[int], None]
"""Called with the number of objects that were deleted since the last call."""


class Backend(Protocol):
    """Everything raises CkptErrors and blocks. ``checkpoint``: "latest", a step or an id."""

    def close(self) -> None:
        """Release connections."""
        ...

    def listing(self, url: str, *, with_copies: bool = False) -> Listing:
        """Every checkpoint of the run; reads keys only. Raises NotFoundError: no run there.

        With ``with_copies`` nodes are asked what they hold: this one, or all that the server knows of.
        """
        ...

    def details(self, url: str, checkpoints: Sequence[str]) -> dict[str, Details | CkptError]:
        """What the manifests of ``checkpoints`` (ids) say, or why one cannot be read; read in parallel."""
        ...

    def show(self, url: str, checkpoint: str) -> Shown:
        """One checkpoint in full."""
        ...

    def verify(self, url: str, checkpoint: str, *, deep: bool, on_bytes: OnBytes) -> Verified:
        """Check one checkpoint; damage is returned, not raised."""
        ...

    def repair(self, url: str, checkpoint: str, *, peers: Sequence[str], dry_run: bool) -> Repair:
        """Put again what is damaged of one checkpoint; what cannot be is returned, not raised."""
        ...

    def plan_prune(self, url: str, policy: Policy) -> PrunePlan:
        """Say what a prune would do. Raises RefusedError where it would be refused."""
        ...

    def prune(self, url: str, plan: PrunePlan, on_deleted: OnDeleted) -> int:
        """Delete exactly what ``plan`` condemns; returns how many objects went. Raises RefusedError."""
        ...

    def sweep(self, url: str, *, older_than_s: float, dry_run: bool, force: bool, on_swept: OnSwept) -> Sweep:
        """Delete what never came to be a checkpoint. Raises InvalidInputError for a grace under an hour."""
        ...

    def pin(self, url: str, checkpoint: str, *, pinned: bool) -> str:
        """Pin or unpin; returns the id."""
        ...

    def runs(self, root: str) -> list[RunRow]:
        """The runs below ``root``; empty: those registered at the server."""
        ...


def read_token(path: Path | None) -> str | None:
    """Return the token in the file ``path``. Raises InvalidInputError where it cannot be read."""
    if path is None:
        return None
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError("cannot read the token file", code="token", path=path) from error


def open_backend(server: ServerOptions, store: StoreOptions) -> Backend:
    """Choose by ``--server``. Raises InvalidInputError for options that do not go together."""
    if not server.server:
        # Here: a store and its messages are not needed for --help or through a server.
        from ckpt.cli.direct import DirectBackend

        return DirectBackend(store.as_mapping(), staging=store.staging)
    if store.as_mapping():
        raise InvalidInputError(
            "--endpoint-url and --option are for direct access; a server has its own store options. "
            "Leave them out, or pass --server ''",
            code="options",
            server=server.server,
        )
    # Here: importing grpc takes longer than listing a local store.
    from ckpt.cli.remote import RemoteBackend

    return RemoteBackend(server.server, token=read_token(server.token_file), ca=server.ca)
