"""Several model chunks on one rank (interleaved pipeline stages) taken as one model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ckpt.errors import InvalidInputError

__all__ = ["ModelChunks", "as_one_module"]


class ModelChunks(torch.nn.Module):
    """Holds the chunks; its children's numbers are no part of a name (see ckpt_trainer_hooks.names)."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        for number, chunk in enumerate(chunks):
            self.add_module(str(number), chunk)


def as_one_module(name: str, item: object) -> object:
    """Return a list or tuple of modules as one module, anything else as it is.

    Each chunk names its parameters as the whole model does (``layers.7.weight``); a name that two chunks have
    must be one and the same tensor.

    Raises:
        InvalidInputError: there are modules in the list, but not only modules; or none at all.
    """
    if not isinstance(item, list | tuple):
        return item
    if not item or not all(isinstance(chunk, torch.nn.Module) for chunk in item):
        raise InvalidInputError(
            "a list that is an item must be of modules, the chunks of one model",
            item=name,
            types=[type(chunk).__name__ for chunk in item],
        )
    return item[0] if len(item) == 1 else ModelChunks(item)
