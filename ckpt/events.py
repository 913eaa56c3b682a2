"""One structured log line per event: a constant name, values as fields."""

from __future__ import annotations

import logging

__all__ = ["event", "get_logger"]


def get_logger(name: str) -> logging.Logger:
    """Return the logger ``ckpt.<name>``."""
    return logging.getLogger(f"ckpt.{name}")


def event(log: logging.Logger, level: int, name: str, /, **fields: object) -> None:
    """Log ``name key=value ...`` at ``level``; the fields are also on the record as ``fields``."""
    if not log.isEnabledFor(level):
        return
    text = " ".join(f"{key}={_show(value)}" for key, value in fields.items())
    log.log(level, "%s %s", name, text, extra={"event": name, "fields": fields})


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return f'"{text}"' if " " in text else text
