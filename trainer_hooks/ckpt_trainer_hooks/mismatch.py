"""What does not fit between a checkpoint and the live state: all of it, before a byte is read."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from ckpt.errors import InvalidInputError
from ckpt.events import event, get_logger

__all__ = ["Mismatch"]

_log = get_logger("restore")


@dataclass(slots=True)
class Mismatch:
    """Everything that does not fit, collected before a byte is read.

    Attributes:
        missing: wanted by the live state, not in the checkpoint.
        unexpected: in the checkpoint, wanted by nobody.
        shapes: name, saved and live shape.
        dtypes: name, saved and live dtype.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)

    def raise_if_any(self, *, allow_missing: bool = False, allow_unexpected: bool = False) -> None:
        """Raise InvalidInputError listing all of them; warn of those that are allowed."""
        allowed = {"missing": allow_missing, "unexpected": allow_unexpected}
        found = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "shapes": self.shapes,
            "dtypes": self.dtypes,
        }
        wrong = {kind: "; ".join(names) for kind, names in found.items() if names and not allowed.get(kind)}
        if wrong:
            raise InvalidInputError(
                "the checkpoint does not fit the live state; nothing was changed. allow_missing and "
                "allow_unexpected (strict=False: both) leave such entries out, cast_dtypes converts, rename "
                "and exclude help where names differ",
                code="mismatch",
                **wrong,
            )
        for kind in allowed:
            if found[kind]:
                event(
                    _log,
                    logging.WARNING,
                    "restore.left_out",
                    kind=kind,
                    count=len(found[kind]),
                    names="; ".join(found[kind]),
                )
