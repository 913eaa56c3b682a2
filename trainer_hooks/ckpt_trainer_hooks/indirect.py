"""Live tensors that cannot be written in place element by element: filled from a copy at the end."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ckpt.errors import InvalidInputError
from ckpt_trainer_hooks.elements import copy_elements, movable, zeros

__all__ = ["filled_later"]


def filled_later(name: str, live: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]] | None:
    """Return (a tensor to fill, what then moves it into ``live``); None: ``live`` can be filled itself.

    Expanded tensors hold one element in several places, and torch does not write into them; inference tensors
    are written in inference mode only.

    Raises (the function that is returned):
        InvalidInputError: the saved values differ where the live tensor has room for one.
    """
    if live.is_contiguous() and not live.is_inference():
        return None
    repeated = [
        dim for dim, (size, step) in enumerate(zip(live.shape, live.stride(), strict=True)) if size > 1 > step
    ]
    if not repeated and not live.is_inference():
        return None
    filled = zeros(live.shape, live.dtype, live.device)

    def write() -> None:
        source, target = filled, live
        for dim in repeated:
            source, target = source.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
        if repeated and not torch.equal(_bits(source.expand(filled.shape)), _bits(filled)):
            raise InvalidInputError(
                "the live tensor is expanded, so it has room for one value where the saved ones differ; make "
                "it contiguous before the restore",
                code="expanded",
                tensor=name,
                shape=tuple(live.shape),
                stride=live.stride(),
            )
        with torch.inference_mode(live.is_inference()):
            copy_elements(target, source)

    return filled, write


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """NaN equals itself."""
    return movable(tensor).contiguous().reshape(-1).view(torch.uint8)
