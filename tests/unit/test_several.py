"""What the manager calls several optimizers or schedulers that are given as one argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckpt.errors import InvalidInputError
from ckpt_trainer_hooks.several import named_items

ONE, OTHER = (torch.optim.SGD([torch.zeros(1)]) for _ in range(2))


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, []),
        (ONE, ["optimizer"]),
        ([ONE], ["optimizer_0"]),
        ([ONE, OTHER], ["optimizer_0", "optimizer_1"]),
        ((None, OTHER), ["optimizer_1"]),
        ({"muon": ONE, "adam": OTHER}, ["optimizer_muon", "optimizer_adam"]),
    ],
)
def test_names_of_items_follow_from_position_or_key(value: Any, names: list[str]) -> None:
    assert list(named_items("optimizer", value)) == names


def test_object_with_a_state_is_one_object_whatever_it_is_derived_from() -> None:
    class Schedulers(list[int]):
        def state_dict(self) -> dict[str, int]:
            return {}

    several = Schedulers([1, 2])
    assert named_items("lr_scheduler", several) == {"lr_scheduler": several}


@pytest.mark.parametrize("key", ["", "a.b", 3])
def test_keys_that_make_no_item_name_are_refused(key: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        named_items("optimizer", {key: ONE})
    assert caught.value.context == {"argument": "optimizer", "key": key}
