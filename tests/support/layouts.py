"""Random meshes, placements and layouts for property tests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckpt.format.layout import Mesh, Placement, Replicate, Shard, StridedShard, TensorLayout
from ckpt.geometry import Region

__all__ = ["LARGE_SHAPES", "layouts", "meshes", "placements", "read_region", "shapes", "world_of"]

# With 16-byte elements at least 1 MiB, so that replicas share the tensor.
LARGE_SHAPES = ((70001,), (3, 23000), (257, 300), (5, 7, 2003), (131072, 1))


@st.composite
def meshes(draw: st.DrawFn, *, size: int | None = None, base: int | None = None) -> Mesh:
    """Meshes of 1-3 dims: plain, transposed, strided, or with ranks in random order.

    Args:
        draw: hypothesis's.
        size: number of ranks; random up to 24 where it is None.
        base: lowest rank; random where it is None.
    """
    if size is None:
        shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda s: math.prod(s) <= 24))
    else:
        first = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        shape = draw(st.permutations([first, size // first]))
    count = math.prod(shape)
    start = draw(st.integers(0, 9)) if base is None else base
    kind = draw(st.sampled_from(["plain", "transposed", "strided", "random"]))
    ranks = np.arange(count)
    if kind == "transposed":
        ranks = ranks.reshape(shape[::-1]).T.reshape(-1)
    elif kind == "strided" and size is None:
        ranks = ranks * 3
    elif kind == "random":
        ranks = np.array(draw(st.permutations(range(count))))
    names = draw(st.sampled_from([(), tuple("abc"[: len(shape)])]))
    return Mesh.from_ranks(shape, names, [int(rank) + start for rank in ranks])


def placements(mesh: Mesh, ndim: int) -> st.SearchStrategy[tuple[Placement, ...]]:
    """One placement per mesh dim; several may split the same tensor dim."""
    choices: list[st.SearchStrategy[Placement]] = [st.just(Replicate())]
    if ndim:
        dims = st.integers(0, ndim - 1)
        choices += [st.builds(Shard, dims), st.builds(StridedShard, dims, st.integers(1, 5))]
    return st.tuples(*[st.one_of(choices) for _ in mesh.shape])


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    """Small shapes of 0-3 dims; sizes odd, even, one and zero."""
    return st.lists(st.integers(0, 13), max_size=3).map(tuple)


@st.composite
def layouts(
    draw: st.DrawFn,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: str = "int64",
    size: int | None = None,
    base: int | None = None,
) -> TensorLayout:
    """Layouts over :func:`meshes`; of a tensor of ``shape``, or of a small random one."""
    chosen = draw(shapes()) if shape is None else shape
    mesh = draw(meshes(size=size, base=base))
    name = draw(st.sampled_from(["w", "layers.0.bias", "model.norm", "x.y.z"]))
    return TensorLayout(name, dtype, chosen, mesh, draw(placements(mesh, len(chosen))))


def world_of(layout: TensorLayout) -> Sequence[int]:
    """All ranks of the layout's mesh."""
    return layout.mesh.ranks


def read_region(full: NDArray[np.generic], region: Region) -> NDArray[np.generic]:
    """Return the local array that covers ``region`` of ``full``, the slow and obvious way."""
    if not region.runs:
        return full.copy()
    index = [[i for run in runs for i in range(run.start, run.start + run.length)] for runs in region.runs]
    return full[np.ix_(*index)]
