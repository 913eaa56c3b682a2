"""Plain values of several ranks put together: pipeline stages and expert groups each have a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["GRADIENTS", "MODULE", "OPTIMIZER", "merge_values"]

# docs/format.md, "State values": the kinds of items that have a part on each rank.
MODULE = "module"
OPTIMIZER = "optimizer"
GRADIENTS = "gradients"


def merge_values(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the union of decoded SegmentIndex.state trees.

    Modules and optimizers are united by name. Of anything else, and of what two parts say differently, the
    first part's counts: stateful objects and plain values must be the same on every rank, or be declared per
    rank.
    """
    merged: dict[str, Any] = {"items": {}, "aliases": {}}
    for part in parts:
        if "parts" in part:
            merged["parts"] = {**part["parts"], **merged.get("parts", {})}
        merged["aliases"] = {**part["aliases"], **merged["aliases"]}
        for name, item in part["items"].items():
            known = merged["items"].get(name)
            if known is None:
                merged["items"][name] = dict(item)
            elif known["kind"] == item["kind"] == MODULE:
                known["extra"] = {**item["extra"], **known["extra"]}
            elif known["kind"] == item["kind"] == OPTIMIZER:
                known["groups"] = [*known["groups"], *item["groups"]]
                known["scalars"] = {**item["scalars"], **known["scalars"]}
                known["forms"] = {**item.get("forms", {}), **known.get("forms", {})}
                known["common"] = {**item["common"], **known["common"]}
            elif known["kind"] == item["kind"] == GRADIENTS:
                known["own"] = known["own"] or item["own"]
    return merged
