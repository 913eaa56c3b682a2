"""Which cases of docs/cases.md a test is about."""

from __future__ import annotations

import re

__all__ = ["case_ids"]

# In names words are parted by underscores. Invariants of docs/format.md are called so where they are meant.
_ID = re.compile(r"(?<![A-Za-z0-9])(?<!invariant )I\d{2,3}(?![A-Za-z0-9])")


def case_ids(name: str, docstring: str | None) -> list[str]:
    """Return the ids in a test's name and docstring, such as ["I57"], each once, in their order."""
    return list(dict.fromkeys(_ID.findall(f"{name} {docstring or ''}")))
