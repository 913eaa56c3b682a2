"""Identities: run names, checkpoint ids and their text forms."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckpt.errors import InvalidInputError
from ckpt_proto.v1 import common_pb2

__all__ = ["MAX_ATTEMPT", "MAX_STEP", "CheckpointId", "check_run_name", "same_run", "split_run_url"]

MAX_STEP = 999_999_999_999
MAX_ATTEMPT = 999_999
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ID = re.compile(r"(\d{12})\.a(\d{6})", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """One checkpoint of a run. Ordered by step, then attempt.

    Attributes:
        step: optimizer steps completed when the state was captured.
        attempt: start number of the run that captured it: 1, 2, 3 ...
    """

    step: int
    attempt: int

    def __post_init__(self) -> None:
        if not 0 <= self.step <= MAX_STEP:
            raise InvalidInputError("step out of range", step=self.step, largest=MAX_STEP)
        if not 1 <= self.attempt <= MAX_ATTEMPT:
            raise InvalidInputError("attempt out of range", attempt=self.attempt, largest=MAX_ATTEMPT)

    def __str__(self) -> str:
        return f"{self.step:012d}.a{self.attempt:06d}"

    @classmethod
    def parse(cls, text: str) -> CheckpointId:
        """Parse ``000000012000.a000003``. Raises InvalidInputError."""
        match = _ID.fullmatch(text)
        if match is None:
            raise InvalidInputError(
                "not a checkpoint id; expected <step:12 digits>.a<attempt:6 digits>", text=text
            )
        return cls(int(match[1]), int(match[2]))

    def to_proto(self) -> common_pb2.CheckpointId:
        return common_pb2.CheckpointId(step=self.step, attempt=self.attempt)

    @classmethod
    def from_proto(cls, message: common_pb2.CheckpointId) -> CheckpointId:
        return cls(message.step, message.attempt)


def check_run_name(name: str) -> None:
    """Raise InvalidInputError unless ``name`` is a legal run name."""
    if _RUN.fullmatch(name) is None:
        raise InvalidInputError(
            "illegal run name: use letters, digits, '.', '_' and '-', at most 128, no leading punctuation",
            run=name,
        )


def split_run_url(url: str) -> tuple[str, str]:
    """Split a run's URL into (root URL, run name): the last path component names the run.

    Raises:
        InvalidInputError: no path component is left for the run, or it is not a legal run name.
    """
    root, _, run = url.rstrip("/").rpartition("/")
    if not root or root.endswith(("/", ":")):
        raise InvalidInputError("the URL of a run needs a root and a run name, e.g. s3://bucket/run", url=url)
    check_run_name(run)
    return root, run


def same_run(run_id: str, other: str) -> bool:
    """Return whether two run ids may be of one life of a run. An empty one says nothing: what has none was
    written by an older version.
    """
    return not run_id or not other or run_id == other
