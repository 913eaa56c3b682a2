"""The replica audit on random layouts: silent while replicas are equal, and it finds one that is not."""

from __future__ import annotations

import numpy as np
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.format import region
from ckpt.format.audit import audited_stripe, check_replicas
from ckpt.format.layout import (
    LayoutSet,
    Mesh,
    Replicate,
    Shard,
    TensorLayout,
    local_region,
    owned_stripe,
    replication,
)
from ckpt_proto.v1 import disk_pb2

SHAPE = (6, 5)


def _digest(local: np.ndarray, stripe: region.Stripe | None) -> bytes:
    if stripe is None:
        return bytes(8)
    part = local[tuple(slice(a, a + n) for a, n in zip(stripe.local_start, stripe.region.shape, strict=True))]
    return (xxhash.xxh3_64_intdigest(np.ascontiguousarray(part)) or 1).to_bytes(8, "little")


def _segments(
    layout: TensorLayout, locals_: dict[int, np.ndarray], shift: int
) -> list[disk_pb2.SegmentSummary]:
    layouts = LayoutSet([layout])
    found = []
    for rank, local in locals_.items():
        audit = disk_pb2.ReplicaAudit(
            shift=shift,
            own=_digest(local, owned_stripe(layout, rank)),
            other=_digest(local, audited_stripe(layout, rank, shift)),
        )
        found.append(disk_pb2.SegmentSummary(rank=rank, layout_digest=layouts.digest, audit=audit))
    return found


layouts = st.builds(
    lambda mesh, kinds, name: TensorLayout(
        name,
        "float64",
        SHAPE,
        Mesh.from_ranks(mesh, tuple("abc"[: len(mesh)]), range(int(np.prod(mesh)))),
        tuple(Replicate() if kind < 0 else Shard(kind) for kind in kinds[: len(mesh)]),
    ),
    st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    st.lists(st.integers(-1, 1), min_size=3, max_size=3),
    st.sampled_from(["a", "b", "weight", "x.y"]),
)


@settings(max_examples=200, deadline=None)
@given(layouts, st.booleans(), st.integers(0, 9), st.data())
def test_equal_replicas_pass_and_a_changed_one_is_named(
    layout: TensorLayout, striped: bool, shift: int, data: st.DataObject
) -> None:
    saved = region.STRIPE_MIN_NBYTES
    region.STRIPE_MIN_NBYTES = 0 if striped else 1 << 20
    try:
        full = np.arange(30, dtype=np.float64).reshape(SHAPE)
        locals_ = {}
        for rank in layout.mesh.ranks:
            part = local_region(layout, rank)
            assert part is not None
            rows = [run.start + i for run in part.runs[0] for i in range(run.length)]
            columns = [run.start + i for run in part.runs[1] for i in range(run.length)]
            locals_[rank] = full[np.ix_(rows, columns)].copy()
        by_digest = {LayoutSet([layout]).digest: LayoutSet([layout])}
        world = layout.mesh.size

        def check(number: int) -> list[Exception]:
            return list(check_replicas(_segments(layout, locals_, number), by_digest, world_size=world))

        assert check(shift) == []
        victim = data.draw(st.sampled_from(sorted(locals_)))
        count = replication(layout, victim)[0]
        if count == 1 or locals_[victim].size == 0:
            return
        locals_[victim].flat[data.draw(st.integers(0, locals_[victim].size - 1))] += 0.5
        problems = [problem for number in range(count - 1) for problem in check(number)]
        assert problems
        assert all(victim in problem.context["ranks"] for problem in problems)
    finally:
        region.STRIPE_MIN_NBYTES = saved
