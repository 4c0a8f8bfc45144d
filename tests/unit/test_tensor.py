"""Slices of weights."""

from __future__ import annotations

import re

import pytest
import torch

from diffgen.distributed.axis import EmptyGroup
from diffgen.distributed.tensor import TensorPlan, slice_empty
from diffgen.errors import ModelError


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 12
        self.inner = torch.nn.Linear(8, 24)
        self.outer = torch.nn.Linear(24, 8)
        self.both = torch.nn.Linear(40, 24)


PLAN = TensorPlan({"inner": "colwise", "outer": "rowwise", "both": "packed_rowwise"}, heads={"": ("heads",)})


def sliced(ranks: int) -> Attention:
    with torch.device("meta"):
        model = Attention()
    slice_empty(model, PLAN, EmptyGroup(ranks), "here")
    return model


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_part_is_cut(ranks: int) -> None:
    model = sliced(ranks)
    assert model.heads == 12 // ranks
    assert model.inner.weight.shape == (24 // ranks, 8)
    assert model.outer.weight.shape == (8, 24 // ranks)
    assert model.both.weight.shape == (24, 40 // ranks)


@pytest.mark.parametrize(
    ("ranks", "layer", "nearest"),
    [(3, "both.weight is 16 wide", 2), (8, "heads is 12 wide", 4), (5, "heads is 12 wide", 4)],
)
def test_what_does_not_divide_is_refused_with_what_does(ranks: int, layer: str, nearest: int) -> None:
    rule = (
        f"{layer}, which does not divide by tp_size {ranks}; legal for all layers: 1, 2, 4; nearest: tp_size {nearest}"
    )
    with pytest.raises(ModelError, match=re.escape(rule)) as caught:
        sliced(ranks)
    assert caught.value.code == "unsupported_layout"
