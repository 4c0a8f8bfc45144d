"""Shared memory between ranks, which are threads here."""

from __future__ import annotations

import concurrent.futures
import gc
import itertools
import multiprocessing
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from diffgen.distributed.axis import AxisGroup
from diffgen.distributed.collectives import SharedMemoryCollectives
from diffgen.distributed.groups import Control, RankInfo
from diffgen.distributed.layout import may_share_memory
from diffgen.distributed.rows import map_rows_over
from diffgen.errors import PEER_FAILED, PEER_LOST, DiffgenError, InvalidRequest, RanksDiverged, WorkerDied
from diffgen.worker.context import Predict, Row

pytestmark = pytest.mark.timeout(60)


def controls(size: int) -> list[Control]:
    peers: list[dict[int, Connection]] = [{} for _ in range(size)]
    for one, other in itertools.combinations(range(size), 2):
        peers[one][other], peers[other][one] = multiprocessing.Pipe()
    return [Control(RankInfo(rank, size), peers[rank]) for rank in range(size)]


def run(ranks: int, work: Callable[[AxisGroup, Control], Any]) -> list[Any]:
    """What each rank's work returns, or the error that it ends with."""

    def one(control: Control) -> Any:
        rank = control.info.rank
        try:
            group = AxisGroup(rank, ranks, SharedMemoryCollectives(control, list(range(ranks))))
            return work(group, control)
        except DiffgenError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, controls(ranks)))


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_the_same_on_all(ranks: int, dtype: torch.dtype) -> None:
    """Also of many in a row, of sizes that grow and shrink, and of tensors that do not lie in one piece."""

    def work(group: AxisGroup, control: Control) -> list[torch.Tensor]:
        shapes = [(3, 5), (200, 300), (1, 1), (0, 4), (70, 80)]
        return [group.all_reduce(values(group.rank, *shape, dtype=dtype).mT) for shape in shapes * 3]

    sums = run(ranks, work)
    for index, found in enumerate(sums[0]):
        parts = [values(rank, *found.mT.shape, dtype=dtype).mT for rank in range(ranks)]
        expected = parts[0] + parts[1]
        for part in parts[2:]:
            expected = expected + part
        assert all(torch.equal(each[index], expected) for each in sums)


def test_uneven_parts_are_gathered_and_swapped() -> None:
    """Among them none at all, and one tensor for several ranks."""
    sizes = [2, 0, 3]

    def work(group: AxisGroup, control: Control) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        mine = values(group.rank, 4, sizes[group.rank])
        gathered = group.all_gather(mine, sizes, 1)
        parts = [mine[:, :1] if rank == 0 else mine for rank in range(3)]
        shapes = [(4, min(size, 1) if group.rank == 0 else size) for size in sizes]
        swapped = group.all_to_all(parts, shapes)
        shifted = group.shift(mine, (4, sizes[group.rank - 1]))
        return gathered, swapped, shifted

    found = run(3, work)
    whole = [values(rank, 4, size) for rank, size in enumerate(sizes)]
    for rank, (gathered, swapped, shifted) in enumerate(found):
        assert torch.equal(gathered, torch.cat(whole, 1))
        for other, part in enumerate(swapped):
            assert torch.equal(part, whole[other][:, :1] if rank == 0 else whole[other])
        assert torch.equal(shifted, whole[rank - 1])


def test_what_was_received_stays() -> None:
    """A rank writes over what it has shown, but not over what the others have taken."""

    def work(group: AxisGroup, control: Control) -> list[torch.Tensor]:
        return [
            group.all_to_all([torch.full((9,), float(step))] * 2, [(9,), (9,)])[1 - group.rank] for step in range(8)
        ]

    for found in run(2, work):
        assert [each.unique().tolist() for each in found] == [[step] for step in range(8)]


def test_ranks_that_differ_are_told_so() -> None:
    def other_sizes(group: AxisGroup, control: Control) -> None:
        group.all_reduce(torch.zeros(2 + group.rank))

    for rank, error in enumerate(run(2, other_sizes)):
        assert isinstance(error, RanksDiverged)
        sizes = f"rank {1 - rank} sends {4 * (3 - rank)} bytes of torch.float32, not {4 * (2 + rank)} bytes of torch"
        assert sizes in error.message

    def other_dtypes(group: AxisGroup, control: Control) -> None:
        group.all_reduce(torch.zeros(2, dtype=(torch.float16, torch.bfloat16)[group.rank]))

    for rank, error in enumerate(run(2, other_dtypes)):
        assert isinstance(error, RanksDiverged)
        names = ["4 bytes of torch.bfloat16", "4 bytes of torch.float16"]
        assert f"rank {1 - rank} sends {names[rank]}, not {names[1 - rank]}" in error.message


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    """Nor is what it left half done in the way of the next unit."""

    def work(group: AxisGroup, control: Control) -> tuple[str, torch.Tensor]:
        code = ""
        group.all_reduce(torch.ones(3))
        try:
            if group.rank > 0:
                group.all_reduce(torch.ones(3))
        except RanksDiverged as error:
            code = error.code
        control.gather_vote([1])
        return code, group.all_reduce(values(group.rank, 5))

    found = run(3, work)
    assert [code for code, _ in found] == ["", PEER_FAILED, PEER_FAILED]
    assert all(torch.equal(total, found[0][1]) for _, total in found)


def test_what_is_asked_of_the_environment_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFGEN_COLLECTIVES", "mpi")
    with pytest.raises(InvalidRequest, match="'mpi': it takes 'shared' or 'gloo'"):
        may_share_memory(torch.device("cpu"))
    monkeypatch.setenv("DIFFGEN_COLLECTIVES", "gloo")
    with pytest.raises(InvalidRequest, match=r"'gloo' is for CPU processes, and ranks on cuda .* NCCL; leave it out"):
        may_share_memory(torch.device("cuda", 0))
    monkeypatch.setenv("DIFFGEN_COLLECTIVES", "shared")
    monkeypatch.delattr("os.memfd_create")
    with pytest.raises(InvalidRequest, match=r"needs files without a name .* take 'gloo'"):
        may_share_memory(torch.device("cpu"))


def test_what_a_failed_share_has_computed_is_let_go() -> None:
    """At once, and not when garbage is collected: it is the memory that the next request needs."""
    held: list[weakref.ref[torch.Tensor]] = []

    def work(group: AxisGroup, control: Control) -> str:
        def local(predict: Predict, share: Sequence[Row]) -> list[torch.Tensor]:
            computed = torch.ones(3)
            if group.rank == 1:
                held.append(weakref.ref(computed))
                raise MemoryError
            return [computed for _ in share]

        try:
            map_rows_over(group, lambda rows: [], [Row(torch.ones(2, 3), torch.tensor(0), {}, "")], local)
        except Exception as error:
            return type(error).__name__
        return ""

    gc.disable()
    try:
        assert run(2, work) == ["GenerationError", "MemoryError"]
        assert [ref() for ref in held] == [None]
    finally:
        gc.enable()


def test_a_rank_that_has_gone_is_lost() -> None:
    def work(group: AxisGroup, control: Control) -> None:
        if group.rank == 0:
            control._peers[1].close()
        else:
            group.all_reduce(torch.ones(3))

    _, lost = run(2, work)
    assert isinstance(lost, WorkerDied)
    assert lost.code == PEER_LOST
