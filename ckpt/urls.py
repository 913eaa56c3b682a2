"""The URL of a run as people write it."""

from __future__ import annotations

from pathlib import Path

from ckpt.errors import InvalidInputError

__all__ = ["absolute_url"]


def absolute_url(url: str) -> str:
    """Return ``url`` without trailing slash, a bare path as an absolute ``file://`` URL.

    One rule for trainers, readers and the command: the staging directory files a run under its URL.

    Raises:
        InvalidInputError: empty.
    """
    if not url:
        raise InvalidInputError("the URL is empty", code="url")
    return url.rstrip("/") if "://" in url else f"file://{Path(url).absolute()}"
