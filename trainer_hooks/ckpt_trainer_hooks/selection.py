"""Which part of a checkpoint a restore takes, and under which names.

Patterns are those of :mod:`fnmatch`, case-sensitive; ``*`` also crosses dots. They are matched against the
names of the *live* state as ``ckpt show`` prints them: ``model.layers.0.weight``,
``optimizer.layers.0.weight.exp_avg``. Items that are not modules or optimizers (schedulers, loaders, plain
values, and ``rng``) are taken or left whole: ``scheduler`` and ``scheduler.*`` both name one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch

from ckpt import dtypes
from ckpt.errors import InvalidInputError

__all__ = ["RNG_ITEM", "Rename", "RestoreOptions", "can_cast", "patterns", "rename_function"]

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str]
"""From names in the checkpoint to live ones: a function, or patterns with one ``*`` on each side or none."""

RNG_ITEM = "rng"
_NOT_NUMBERS = re.compile(r"torch\.(float4.*|bits.*|u?int[1-7])")
_WILDCARDS = ("*", "?", "[")
_ALL = ("*",)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions:
    """What to restore and how strictly. What is left out stays untouched.

    Attributes:
        include: patterns of what to take.
        exclude: patterns of what to leave out of that.
        weights_only: take only modules: neither optimizers, schedulers and loaders nor random numbers.
        rename: see :data:`Rename`; of modules' tensors. Optimizer state follows the names of its parameters.
            A renamed tensor takes the place of one that has its new name already.
        allow_missing: leave live tensors alone that the checkpoint lacks, with a warning.
        allow_unexpected: ignore what only the checkpoint has, with a warning.
        cast_dtypes: convert tensors of modules to the live dtype, with a warning for each pair of dtypes.
    """

    include: tuple[str, ...] = _ALL
    exclude: tuple[str, ...] = ()
    weights_only: bool = False
    rename: Rename | None = None
    allow_missing: bool = False
    allow_unexpected: bool = False
    cast_dtypes: bool = False

    @classmethod
    def of(
        cls,
        *,
        include: str | Collection[str] | None = None,
        exclude: str | Collection[str] = (),
        weights_only: bool = False,
        rename: Rename | None = None,
        strict: bool = True,
        allow_missing: bool | None = None,
        allow_unexpected: bool | None = None,
        cast_dtypes: bool = False,
    ) -> RestoreOptions:
        """Return the options as users give them: ``strict`` decides what ``allow_*`` leave open.

        Raises:
            InvalidInputError: an empty list of patterns, or a rename pattern that is none.
        """
        if rename is not None:
            rename_function(rename)  # raises
        return cls(
            include=_ALL if include is None else patterns("include", include),
            exclude=patterns("exclude", exclude, may_be_empty=True),
            weights_only=weights_only,
            rename=rename,
            allow_missing=not strict if allow_missing is None else allow_missing,
            allow_unexpected=not strict if allow_unexpected is None else allow_unexpected,
            cast_dtypes=cast_dtypes,
        )

    def takes(self, name: str) -> bool:
        """Whether the tensor ``name`` is taken, as far as its name decides."""
        if self.include == _ALL and not self.exclude:  # the common case, asked twice for each tensor
            return True
        return _fits(name, self.include) and not _fits(name, self.exclude)

    def takes_item(self, item: str, *, is_module: bool = False) -> bool:
        """Whether an item that cannot be taken in parts is taken."""
        if self.weights_only and not is_module:
            return False
        names = (item, f"{item}.")
        return any(_fits(name, self.include) for name in names) and not any(
            _fits(name, self.exclude) for name in names
        )

    def touches(self, item: str, *, is_module: bool) -> bool:
        """Whether some tensor of a module or optimizer may be taken."""
        if self.weights_only and not is_module:
            return False
        prefix = f"{item}."
        if any(pattern.endswith("*") and fnmatchcase(prefix, pattern) for pattern in self.exclude):
            return False
        heads = (_literal_head(pattern) for pattern in self.include)
        return any(head.startswith(prefix) or prefix.startswith(head) for head in heads)

    def check_used(self, names: Iterable[str]) -> None:
        """Raise InvalidInputError if an include pattern fits none of ``names``: most likely mistyped."""
        known = list(names)
        unused = [
            pattern for pattern in self.include if not any(fnmatchcase(name, pattern) for name in known)
        ]
        if unused:
            raise InvalidInputError(
                "a pattern fits neither the checkpoint nor the live state", code="pattern", include=unused
            )


def patterns(option: str, given: str | Collection[str], *, may_be_empty: bool = False) -> tuple[str, ...]:
    """Return one or several patterns as a tuple. Raises InvalidInputError where there is none."""
    found = (given,) if isinstance(given, str) else tuple(given)
    if not found and not may_be_empty:
        raise InvalidInputError("give at least one pattern", code="pattern", option=option)
    return found


def rename_function(rename: Rename) -> Callable[[str], str]:
    """Return ``rename`` as a function; of several patterns the first that fits counts.

    Raises:
        InvalidInputError: a pattern has several ``*``, or its replacement has not as many.
    """
    if not isinstance(rename, Mapping):
        return rename
    rules = []
    for old, new in rename.items():
        if old.count("*") > 1 or old.count("*") != new.count("*"):
            raise InvalidInputError(
                "a rename pattern has one * on each side, or none", code="rename", old=old, new=new
            )
        rules.append((old.partition("*"), new.partition("*")))

    def apply(name: str) -> str:
        for (head, star, tail), (new_head, _, new_tail) in rules:
            if not star:
                if name == head:
                    return new_head
            elif name.startswith(head) and name.endswith(tail) and len(name) >= len(head) + len(tail):
                return new_head + name[len(head) : len(name) - len(tail)] + new_tail
        return name

    return apply


def can_cast(saved: str, live: torch.dtype) -> bool:
    """Whether ``cast_dtypes`` may turn ``saved`` (torch's name) into ``live``.

    Never: a real number's fraction, an imaginary part or high bits of an integer thrown away, or packed
    elements taken apart.
    """
    source = getattr(torch, saved, None)
    if not isinstance(source, torch.dtype) or not dtypes.is_known(saved):
        return False
    if _is_packed(source) or _is_packed(live) or not torch.can_cast(source, live):
        return False
    if _is_integer(source) and _is_integer(live):
        return (
            torch.iinfo(live).min <= torch.iinfo(source).min
            and torch.iinfo(source).max <= torch.iinfo(live).max
        )
    return True


def _is_packed(dtype: torch.dtype) -> bool:
    """Whether elements are not numbers of whole bytes: float4 pairs, bits, integers of less than 8 bits."""
    return _NOT_NUMBERS.fullmatch(str(dtype)) is not None


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool


def _fits(name: str, wanted: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in wanted)


def _literal_head(pattern: str) -> str:
    ends = [at for mark in _WILDCARDS if (at := pattern.find(mark)) >= 0]
    return pattern[: min(ends)] if ends else pattern
