"""A tensor on a part of the job's mesh, described with its replicas on the rest of it.

Tensor parallelism under DDP, or a norm that FSDP2 shards beside tensor-parallel linears, puts a DTensor on
a slice of the root mesh. Each slice alone would be a whole copy of the tensor, written once per slice. Where
the ranks of the other slices hold the same part of the model, the slices are replicas, and share the writing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from ckpt.format.layout import Mesh

__all__ = ["with_replicas"]

Shape = tuple[int, ...]


def with_replicas(mesh: Mesh, root: Mesh, peers: frozenset[int]) -> tuple[Mesh, int]:
    """Return ``mesh`` with replica dims of ``root`` before its own, and how many of them.

    A root dim that ``mesh`` does not span is a replica dim if it leads from each of ``peers`` to peers only:
    a pipeline dim leads to other names and is left out. All peers come to the same answer by themselves.

    Args:
        mesh: of the tensor; its dims are dims of ``root``, or several of them flattened.
        root: the mesh that ``mesh`` was sliced from.
        peers: the ranks with tensors of the same names as this rank's, this rank among them.
    """
    coords = [root.coord_of(rank) for rank in mesh.ranks]
    if mesh.size >= root.size or None in coords:
        return mesh, 0
    spanned, free = _split_dims([coord for coord in coords if coord is not None], root.ndim)
    if _product(root.shape, spanned) != mesh.size:
        return mesh, 0  # a part of a dim: which ranks have the other parts is not known
    dims = [dim for dim in free if root.shape[dim] > 1 and _stays_among(peers, root, dim)]
    if not dims:
        return mesh, 0
    ranks = []
    for place in product(*(range(root.shape[dim]) for dim in dims)):
        for coord in coords:
            assert coord is not None
            moved = list(coord)
            for dim, index in zip(dims, place, strict=True):
                moved[dim] = index
            ranks.append(root.rank_at(moved))
    names = (*(root.names[dim] for dim in dims), *mesh.names) if root.names and mesh.names else ()
    return Mesh.from_ranks((*(root.shape[dim] for dim in dims), *mesh.shape), names, ranks), len(dims)


def _split_dims(coords: Sequence[Shape], ndim: int) -> tuple[list[int], list[int]]:
    """The root dims along which the coordinates differ, and the others."""
    spanned = [dim for dim in range(ndim) if len({coord[dim] for coord in coords}) > 1]
    return spanned, [dim for dim in range(ndim) if dim not in spanned]


def _product(shape: Shape, dims: Sequence[int]) -> int:
    total = 1
    for dim in dims:
        total *= shape[dim]
    return total


def _stays_among(peers: frozenset[int], root: Mesh, dim: int) -> bool:
    if peers == root.ranks_set:  # nearly always, and then nothing need be looked at
        return True
    for rank in peers:
        coord = root.coord_of(rank)
        if coord is None:
            return False
        line = (root.rank_at((*coord[:dim], index, *coord[dim + 1 :])) for index in range(root.shape[dim]))
        if any(other not in peers for other in line):
            return False
    return True
