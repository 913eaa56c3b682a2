"""CkptError <-> gRPC status."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from ckpt.errors import (
    BusyError,
    CkptError,
    ConflictError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    RefusedError,
    TimeoutExceededError,
    UnavailableError,
)
from ckpt.format.problem import error_from_info, error_to_info
from ckpt.rpc.status import ERROR_METADATA_KEY, STATUS_CODES, error_from_rpc, status_code


class _Failed(grpc.RpcError):
    """What grpc raises: an RpcError that is a Call as well."""

    def __init__(
        self, code: grpc.StatusCode, details: str = "", metadata: tuple[tuple[str, bytes], ...] = ()
    ) -> None:
        super().__init__()
        self._parts = (code, details, metadata)

    def code(self) -> grpc.StatusCode:
        return self._parts[0]

    def details(self) -> str:
        return self._parts[1]

    def trailing_metadata(self) -> tuple[Any, ...]:
        return self._parts[2]


@pytest.mark.parametrize("cls", list(STATUS_CODES))
def test_every_error_comes_back_as_it_was(cls: type[CkptError]) -> None:
    error = cls("something is wrong", code="some-code", step=12, path="/x/y")

    info = error_to_info(error)
    failed = _Failed(status_code(error), "ignored", ((ERROR_METADATA_KEY, info.SerializeToString()),))
    back = error_from_rpc(failed)

    assert type(back) is cls
    assert (back.message, back.code) == ("something is wrong", "some-code")
    assert back.context == {"step": "12", "path": "/x/y"}


def test_a_subclass_takes_the_status_of_its_nearest_ancestor() -> None:
    class Special(RefusedError):
        pass

    assert status_code(Special("no")) is grpc.StatusCode.FAILED_PRECONDITION
    # Over the wire it is known by the class that the other side has.
    assert type(error_from_info(error_to_info(Special("no")))) is CkptError


@pytest.mark.parametrize(
    ("code", "expected", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, UnavailableError, "unavailable"),
        (grpc.StatusCode.CANCELLED, UnavailableError, "cancelled"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, TimeoutExceededError, "timeout"),
        (grpc.StatusCode.UNAUTHENTICATED, RefusedError, "unauthenticated"),
        (grpc.StatusCode.UNIMPLEMENTED, InvalidInputError, "unimplemented"),
        (grpc.StatusCode.NOT_FOUND, NotFoundError, "not-found"),
        (grpc.StatusCode.ABORTED, ConflictError, "conflict"),
        (grpc.StatusCode.DATA_LOSS, CorruptError, "corrupt"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, BusyError, "resource-exhausted"),
        (grpc.StatusCode.UNKNOWN, CkptError, "internal"),
    ],
)
def test_a_status_without_details_of_ours_still_gets_the_right_class(
    code: grpc.StatusCode, expected: type[CkptError], reason: str
) -> None:
    error = error_from_rpc(_Failed(code, "from a proxy"), target="unix:/s", method="/x")

    assert type(error) is expected
    assert error.code == reason
    assert error.context == {"target": "unix:/s", "method": "/x", "details": "from a proxy"}


def test_damaged_details_fall_back_to_the_status() -> None:
    failed = _Failed(grpc.StatusCode.NOT_FOUND, "gone", ((ERROR_METADATA_KEY, b"\xff\xff\xff"),))

    assert type(error_from_rpc(failed)) is NotFoundError


def test_a_huge_error_stays_below_the_metadata_limit() -> None:
    """Case I120."""
    context = {f"key{i}": "\N{SNOWMAN}" * 100_000 for i in range(100)}
    error = CorruptError("m" * 1_000_000, code="digest", **context)

    info = error_to_info(error)

    assert info.ByteSize() <= 4096
    assert info.code == "digest"
    assert info.message.endswith("...")
