"""Weights that share storage, weights that only should, and sizes that were padded for a layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt.errors import InvalidInputError
from tests.support.bits import bits_of
from tests.support.snapshot_trip import put_back, take, train_state


class Head(nn.Module):
    """An embedding and a head over it, tied or not."""

    def __init__(self, *, tied: bool, rows: int = 13) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 4)
        self.head = nn.Linear(4, rows, bias=False)
        self.tie_word_embeddings = True  # what a configuration may say of both
        if tied:
            self.head.weight = self.embed.weight


def test_I53_tied_weight_is_stored_once_and_is_still_one_storage() -> None:
    saved = Head(tied=True)
    taken = take(train_state(model=saved))
    assert set(taken.layouts) == {"model.embed.weight"}
    live = Head(tied=True)
    put_back(taken, train_state(model=live))
    assert live.head.weight is live.embed.weight
    assert bits_of(live.head.weight) == bits_of(saved.embed.weight)


def test_I53_tied_weight_restores_into_both_where_the_tie_is_gone() -> None:
    saved, live = Head(tied=True), Head(tied=False)
    put_back(take(train_state(model=saved)), train_state(model=live))
    assert live.head.weight is not live.embed.weight
    assert bits_of(live.head.weight) == bits_of(live.embed.weight) == bits_of(saved.embed.weight)


def test_I53_weights_that_are_only_said_to_be_tied_are_both_kept() -> None:
    saved, live = Head(tied=False), Head(tied=False)
    put_back(take(train_state(model=saved)), train_state(model=live))
    assert bits_of(live.head.weight) == bits_of(saved.head.weight) != bits_of(saved.embed.weight)
    assert bits_of(live.embed.weight) == bits_of(saved.embed.weight)


@pytest.mark.parametrize("rows", [13, 15])
def test_I56_padded_size_is_refused_with_both_sizes_and_nothing_is_touched(rows: int) -> None:
    taken = take(train_state(model=Head(tied=True, rows=16)))
    live = Head(tied=True, rows=rows)
    before = bits_of(live.embed.weight)
    with pytest.raises(InvalidInputError) as caught:
        put_back(taken, train_state(model=live), strict=False)
    assert f"saved [16, 4], live [{rows}, 4]" in caught.value.context["shapes"]
    assert bits_of(live.embed.weight) == before
    assert torch.isfinite(live.embed.weight).all()
