"""The rules of layouts."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffgen.args import RunArgs, ServerArgs, check_args
from diffgen.distributed.dims import AXES, Abilities, ParallelDims, check_degrees, choose_dims, nearest
from diffgen.errors import InvalidRequest

DIT = Abilities(heads=12, guided=True)
UNET = Abilities(tensor="it is a UNet", sequence="it is a UNet", guided=True)
MASKED = Abilities(heads=24, sequence="it has a mask")
WHOLE = Abilities(tensor="it is whole", sequence="it is whole", rows="it is whole")
DEGREES = st.integers(1, 4)
XFUSER = {"attention_backend": "xfuser"}


def chosen(model: Abilities = DIT, **run: Any) -> ParallelDims:
    check_args(ServerArgs(run=RunArgs(**run)))
    return choose_dims(RunArgs(**run), model, "Model")[0]


@given(DEGREES, DEGREES, DEGREES, DEGREES)
def test_every_rank_is_in_one_group_of_each_axis(tp: int, ulysses: int, ring: int, cfg: int) -> None:
    dims = ParallelDims(tp, ulysses, ring, cfg)
    for axes in (["tp"], ["ulysses"], ["ring"], ["cfg"], ["ulysses", "ring"], list(AXES)):
        groups = dims.groups(axes)
        assert sorted(rank for group in groups for rank in group) == list(range(dims.world))
        size = 1
        for axis in axes:
            size *= getattr(dims, axis)
        assert all(len(group) == size and group == sorted(group) for group in groups)
    strides = {group[1] - group[0] for group in dims.groups(["cfg"]) if cfg > 1}
    assert strides <= {tp * ulysses * ring}


@pytest.mark.parametrize(
    ("model", "run", "dims"),
    [
        (DIT, {}, ParallelDims()),
        (DIT, {"num_gpus": 2}, ParallelDims(cfg=2)),
        (DIT, {"num_gpus": 3}, ParallelDims(ulysses=3)),
        (DIT, {"num_gpus": 8}, ParallelDims(ulysses=4, cfg=2)),
        (DIT, {"num_gpus": 16}, ParallelDims(ulysses=4, ring=2, cfg=2)),
        (DIT, {"num_gpus": 5}, ParallelDims(ring=5)),
        (UNET, {"num_gpus": 2}, ParallelDims(cfg=2)),
        (MASKED, {"num_gpus": 4}, ParallelDims(tp=4)),
        (DIT, {"num_gpus": 8, "sp_degree": 8}, ParallelDims(ulysses=4, ring=2)),
        (DIT, {"num_gpus": 8, "sp_degree": 8, "ring_degree": 4}, ParallelDims(ulysses=2, ring=4)),
        (DIT, {"num_gpus": 8, "sp_degree": 8, "ulysses_degree": 2}, ParallelDims(ulysses=2, ring=4)),
        (DIT, {"num_gpus": 4, "ulysses_degree": 2, "enable_cfg_parallel": True}, ParallelDims(ulysses=2, cfg=2)),
        (DIT, {"num_gpus": 6, "tp_size": 2, "cfg_degree": 3}, ParallelDims(tp=2, cfg=3)),
        (WHOLE, {"num_gpus": 4, "dp_size": 4}, ParallelDims()),
        (DIT, {"num_gpus": 4, "dp_size": 2}, ParallelDims(cfg=2)),
        (UNET, {"num_gpus": 3, "cfg_degree": 3}, ParallelDims(cfg=3)),
    ],
)
def test_layouts(model: Abilities, run: dict[str, Any], dims: ParallelDims) -> None:
    assert chosen(model, **run) == dims


@pytest.mark.parametrize(
    ("model", "run", "param", "words"),
    [
        (
            DIT,
            {"num_gpus": 4, "ulysses_degree": 2},
            "num_gpus",
            ["ulysses_degree 2 = 2", "num_gpus is 4", "num_gpus 4 with ulysses_degree 4 alone; or num_gpus 2"],
        ),
        (DIT, {"tp_size": 2, "ring_degree": 3}, "num_gpus", ["tp_size 2 x ring_degree 3 = 6", "num_gpus 6"]),
        (
            DIT,
            {"num_gpus": 5, "ulysses_degree": 5},
            "ulysses_degree",
            ["12", "5", "1, 2, 3, 4, 6, 12", "num_gpus 4 with ulysses"],
        ),
        (DIT, {"num_gpus": 8, "tp_size": 8}, "tp_size", ["12", "tp_size 8", "1, 2, 3, 4, 6, 12", "num_gpus 6 with"]),
        (
            DIT,
            {"num_gpus": 8, "tp_size": 4, "ulysses_degree": 2},
            "ulysses_degree",
            ["12", "4 x ulysses_degree 2 = 8", "num_gpus 6 with tp_size 3 x ulysses_degree 2 alone"],
        ),
        (DIT, {"num_gpus": 10, "tp_size": 10}, "tp_size", ["tp_size 10", "nearest: num_gpus 6 with tp_size 6 alone"]),
        (
            DIT,
            {"num_gpus": 4, "sp_degree": 4, "ring_degree": 3},
            "sp_degree",
            ["sp_degree 4", "with ring_degree 4 alone"],
        ),
        (
            DIT,
            {"num_gpus": 3, "cfg_degree": 3, "enable_cfg_parallel": True},
            "cfg_degree",
            ["3", "2", "with cfg_degree 3 alone"],
        ),
        (UNET, {"num_gpus": 4}, "num_gpus", ["4 ranks", "UNet", "num_gpus 4 with dp_size 2"]),
        (UNET, {"num_gpus": 8, "dp_size": 2}, "num_gpus", ["4 ranks", "UNet", "num_gpus 8 with dp_size 4"]),
        (UNET, {"num_gpus": 2, "tp_size": 2}, "tp_size", ["UNet", "num_gpus 2 with cfg_degree 2 alone"]),
        (
            UNET,
            {"num_gpus": 4, "sp_degree": 4},
            "sp_degree",
            ["UNet", "num_gpus 4 with dp_size 4 alone"],
        ),
        (UNET, {"num_gpus": 2, "ring_degree": 2}, "ring_degree", ["UNet"]),
        (MASKED, {"num_gpus": 2, "ulysses_degree": 2}, "ulysses_degree", ["mask"]),
        (WHOLE, {"num_gpus": 2}, "num_gpus", ["whole", "dp_size 2"]),
        (DIT, {"num_gpus": 5, "dp_size": 2}, "dp_size", ["5", "2", "num_gpus 5 with dp_size 5; or num_gpus 4"]),
        (
            DIT,
            {"num_gpus": 4, "dp_size": 2, "tp_size": 4},
            "num_gpus",
            ["tp_size 4 x dp_size 2 = 8", "dp_size 2 x tp_size 2 alone"],
        ),
        (
            DIT,
            {"num_gpus": 1, "tp_size": 2},
            "num_gpus",
            ["tp_size 2 = 2 ranks", "nearest: num_gpus 1 alone; or num_gpus 2"],
        ),
        (DIT, {"num_gpus": 6, "sp_degree": 4}, "num_gpus", ["num_gpus 6 with sp_degree 6 alone"]),
        (WHOLE, {"num_gpus": 2, "cfg_degree": 2}, "cfg_degree", ["whole", "num_gpus 2 with dp_size 2 alone"]),
        (
            DIT,
            {"num_gpus": 2, "ring_degree": 2, "device": "cpu"} | XFUSER,
            "attention_backend",
            ["xfuser", "CUDA", "native"],
        ),
        (
            DIT,
            {"num_gpus": 4, "ring_degree": 2, "tp_size": 2} | XFUSER,
            "attention_backend",
            ["xfuser", "tp_size 2", "native", "num_gpus 4 with ring_degree 4 alone"],
        ),
        (DIT, {"num_gpus": 2} | XFUSER, "attention_backend", ["xfuser", "cfg 2", "ulysses_degree", "native"]),
    ],
)
def test_what_does_not_work_is_named(model: Abilities, run: dict[str, Any], param: str, words: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chosen(model, **run)
    assert caught.value.param == param
    for word in words:
        assert word in caught.value.message


def _told(error: InvalidRequest) -> dict[str, int]:
    """The options that a message calls nearest."""
    found = re.search(r"nearest: ([a-z0-9_ ]+)", error.message)
    assert found is not None, error.message
    return {name: int(value) for name, value in re.findall(r"(\w+) (\d+)", found[1])}


DEGREE = st.none() | st.integers(1, 12)


@given(
    st.sampled_from([DIT, UNET, MASKED, WHOLE, Abilities(heads=7), Abilities(heads=30, rows="it has none")]),
    st.integers(1, 16),
    st.integers(1, 5),
    st.fixed_dictionaries(
        dict.fromkeys(("tp_size", "sp_degree", "ulysses_degree", "ring_degree", "cfg_degree"), DEGREE)
    ),
    st.booleans(),
)
@settings(max_examples=300)
def test_what_is_called_nearest_is_legal(
    model: Abilities, num_gpus: int, dp_size: int, degrees: dict[str, int | None], guidance: bool
) -> None:
    """As far as the rule goes that names it: those of the arguments come before those of the model."""
    run = RunArgs(num_gpus=num_gpus, dp_size=dp_size, enable_cfg_parallel=guidance, **degrees)
    try:
        check_degrees(run)
    except InvalidRequest as error:
        nearest = _told(error)
        assert nearest["num_gpus"] == num_gpus
        run = RunArgs(**nearest)
        check_degrees(run)
    try:
        choose_dims(run, model, "Model")
    except InvalidRequest as error:
        nearest = _told(error)
        assert nearest["num_gpus"] <= run.num_gpus, "there may be no more devices"
        choose_dims(RunArgs(**nearest), model, "Model")


@given(st.integers(1, 40), st.sets(st.integers(1, 40), min_size=1))
def test_nearest_keeps_the_kind_and_of_two_takes_the_smaller(wanted: int, legal: set[int]) -> None:
    (found,) = nearest((wanted,), ((each,) for each in legal))
    alike = {each for each in legal if (each > 1) == (wanted > 1)} or legal
    assert found in alike
    assert (abs(found - wanted), found) == min((abs(each - wanted), each) for each in alike)


def test_the_reason_is_told() -> None:
    dims, why = choose_dims(RunArgs(num_gpus=8), DIT, "Wan")
    assert str(dims) == "tp 1 x ulysses 4 x ring 1 x cfg 2"
    assert why == "Wan is guided: two branches; tokens over 4: ulysses 4, as it has 12 heads"
