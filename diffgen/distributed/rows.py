"""Sharing out the rows of a step, which are the outputs of each guidance branch of each request."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from diffgen.distributed.axis import AxisGroup, pieces
from diffgen.errors import PEER_FAILED, GenerationError
from diffgen.worker.context import Predict, Row

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Local = Callable[[Predict, Sequence[Row]], list[torch.Tensor]]


def map_rows_over(group: AxisGroup, predict: Predict, rows: Sequence[Row], local: Local) -> list[torch.Tensor]:
    """Each row's prediction, equal in every bit on all ranks, of which each computes its share by ``local``.

    Outputs are shared out one by one, neighbours together, so that any number of branches and requests without guidance
    keep all groups busy. A rank whose share fails still takes part, and its peers fail with it.
    """
    # Rows of one key are neighbours then, and a share has few keys.
    order = sorted(range(len(rows)), key=lambda index: repr(rows[index].key))
    single = [(index, place) for index in order for place in range(len(rows[index].latents))]
    sizes = pieces(len(single), group.size)
    first = sum(sizes[: group.rank])
    failure: Exception | None = None
    mine: list[torch.Tensor] = []
    code = 0
    try:
        share = [_one_output(rows[index], place) for index, place in single[first : first + sizes[group.rank]]]
        if share:
            mine = local(predict, share)
            code = _DTYPES.index(mine[0].dtype) + 1
    except Exception as error:
        # The peers wait for this rank's part: they must hear of it before it is told.
        failure, code = error, -1
    device = rows[0].latents.device
    codes = group.all_gather(torch.tensor([code], device=device), [1] * group.size, 0).tolist()
    if failure is not None:
        try:
            raise failure
        finally:
            # Its traceback holds this frame, which would hold it, and all that the share has computed, in turn.
            del failure
    if -1 in codes:
        raise GenerationError("another rank failed in this unit", code=PEER_FAILED)
    dtype = _DTYPES[max(codes) - 1]
    shapes = [rows[index].latents.shape[1:] for index, _ in single]
    ends = [sum(sizes[: rank + 1]) for rank in range(group.size)]
    numbers = [sum(shape.numel() for shape in shapes[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    flat = torch.cat([torch.empty(0, dtype=dtype, device=device), *(each.reshape(-1) for each in mine)])
    gathered = torch.split(group.all_gather(flat, numbers, 0), [shape.numel() for shape in shapes])
    outputs: list[list[torch.Tensor]] = [[] for _ in rows]
    for (index, _), shape, values in zip(single, shapes, gathered, strict=True):
        outputs[index].append(values.view(shape))
    return [torch.stack(each) for each in outputs]


def _one_output(row: Row, place: int) -> Row:
    return dataclasses.replace(row, latents=row.latents[place : place + 1])
