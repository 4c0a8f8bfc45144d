"""Slices of weights."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from diffgen.distributed.axis import AxisGroup, EmptyGroup
from diffgen.distributed.tensor import TensorPlan, fill_sliced, slice_empty
from diffgen.errors import ModelError


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 12
        self.inner = torch.nn.Linear(8, 24)
        self.outer = torch.nn.Linear(24, 8)
        self.both = torch.nn.Linear(40, 24)
        self.register_buffer("places", torch.arange(8.0))


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


class Whole:
    """A tensor as it is stored."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def get_shape(self) -> list[int]:
        return list(self._values.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._values[index]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_parts_add_up(ranks: int) -> None:
    """What column-wise layers give side by side, and row-wise ones as a sum, is what the whole model gives."""
    torch.manual_seed(0)
    whole = Attention()
    whole.places += 1
    weights = [(name, Whole(values)) for name, values in whole.state_dict().items()]
    inputs, packed = torch.randn(3, 8), torch.randn(3, 40)
    inner, outer, both = [], [], []
    for rank in range(ranks):
        with torch.device("meta"):
            model = Attention()
        assert fill_sliced(model, weights, PLAN, AxisGroup(rank, ranks), "here") == set()
        assert torch.equal(model.places, whole.places), "as it is stored"
        inner.append(model.inner(inputs))
        # Without the sum over ranks that does not come here.
        for layer in (model.outer, model.both):
            layer._forward_hooks.clear()
        outer.append(model.outer(inner[-1]))
        first, second = packed[:, :24].chunk(ranks, 1)[rank], packed[:, 24:].chunk(ranks, 1)[rank]
        both.append(model.both(torch.cat([first, second], 1)))
    torch.testing.assert_close(torch.cat(inner, 1), whole.inner(inputs))
    torch.testing.assert_close(sum(outer), whole.outer(whole.inner(inputs)))
    torch.testing.assert_close(sum(both), whole.both(packed))


def test_what_the_weights_lack_is_told() -> None:
    weights = [(name, Whole(values)) for name, values in Attention().state_dict().items()]
    lacking = {weights[0][0], "outer.bias"}
    with torch.device("meta"):
        model = Attention()
    given = [each for each in weights if each[0] not in lacking]
    assert fill_sliced(model, given, PLAN, AxisGroup(1, 2), "here") == lacking


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
