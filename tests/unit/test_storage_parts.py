from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import InvalidInputError
from ckpt.storage.parts import S3_LIMITS, PartLimits, part_nbytes_for

MIB = 1 << 20
SMALL = PartLimits(parts=10, least_nbytes=5, most_nbytes=3 * MIB)


@pytest.mark.parametrize(
    ("nbytes", "wanted", "part"),
    [
        (0, 16 * MIB, 16 * MIB),
        (1, 1, 5 * MIB),
        (10_000 * 16 * MIB, 16 * MIB, 16 * MIB),
        (10_000 * 16 * MIB + 1, 16 * MIB, 17 * MIB),
        (5 << 40, 16 * MIB, 525 * MIB),
    ],
)
def test_the_part_grows_only_where_the_limits_demand_it(nbytes: int, wanted: int, part: int) -> None:
    """Case I95."""
    assert part_nbytes_for(nbytes, wanted) == part


def test_an_object_too_large_for_the_service_is_refused_before_anything_is_sent() -> None:
    """Case I95."""
    most = SMALL.parts * SMALL.most_nbytes
    assert part_nbytes_for(most, 5, SMALL) == SMALL.most_nbytes
    with pytest.raises(InvalidInputError):
        part_nbytes_for(most + 1, 5, SMALL)


@given(st.integers(0, SMALL.parts * SMALL.most_nbytes), st.integers(1, 4 * MIB))
def test_never_too_many_parts_and_never_a_part_out_of_bounds(nbytes: int, wanted: int) -> None:
    """Case I95."""
    part = part_nbytes_for(nbytes, wanted, SMALL)
    assert -(-nbytes // part) <= SMALL.parts
    assert SMALL.least_nbytes <= part <= SMALL.most_nbytes


@given(st.integers(0, S3_LIMITS.parts * S3_LIMITS.most_nbytes))
def test_every_size_the_service_takes_can_be_sent(nbytes: int) -> None:
    """Case I95."""
    assert -(-nbytes // part_nbytes_for(nbytes, 16 * MIB)) <= S3_LIMITS.parts
