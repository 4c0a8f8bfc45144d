"""Plans and votes between ranks."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import tempfile
from multiprocessing.connection import Listener

import pytest
import torch

from diffgen.distributed.groups import MAX_GATHERED, Control, RankInfo, peers_needed
from diffgen.errors import PEER_FAILED, PEER_LOST, RanksDiverged, WorkerDied
from diffgen.server.supervisor import make_run_folder


def pair() -> tuple[Control, Control]:
    """Both ranks of two; a message waits in its socket until it is read."""
    ours, theirs = multiprocessing.Pipe()
    return Control(RankInfo(0, 2), {1: ours}), Control(RankInfo(1, 2), {0: theirs})


def test_a_rank_alone_has_nobody_to_ask() -> None:
    alone = Control(RankInfo(0, 1))
    assert alone.broadcast(b"plan") == b"plan"
    assert alone.gather_vote([1, -(2**63), 2**63 - 1]) == [[1, -(2**63), 2**63 - 1]]
    assert alone.gather_bytes(b"x") == [b"x"]


def test_plans_come_in_their_order() -> None:
    first, second = pair()
    for plan in (b"", b"a" * 3000, b"b"):
        first.broadcast(plan)
    assert [second.broadcast() for _ in range(3)] == [b"", b"a" * 3000, b"b"]


def test_a_rank_that_runs_other_ticks_is_told_from_one_that_votes() -> None:
    first, second = pair()
    first.broadcast(b"plan")
    with pytest.raises(RanksDiverged, match="rank 0"):
        second.gather_vote([1])


def test_a_rank_that_waits_inside_a_unit_hears_of_a_peer_that_has_left_it() -> None:
    """It goes to the vote as well, where both are heard, and what it has said in the unit is passed over."""
    first, second = pair()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(second.gather_vote, [1])
        with pytest.raises(RanksDiverged, match="rank 1 does not take part") as caught:
            first.exchange({1: b"part"})
        assert caught.value.code == PEER_FAILED
        assert first.gather_vote([2]) == [[2], [1]] == theirs.result()
        theirs_next = pool.submit(second.exchange, {0: b"b"})
        assert first.exchange({1: b"a"}) == {1: b"b"}
        assert theirs_next.result() == {0: b"a"}


@pytest.mark.timeout(10)
def test_a_rank_whose_peer_has_gone_does_not_wait() -> None:
    first, second = pair()
    second._peers[0].close()
    with pytest.raises(WorkerDied, match="lost contact") as lost:
        first.gather_bytes(b"e" * MAX_GATHERED)
    assert lost.value.code == PEER_LOST


def test_lack_of_memory_is_no_lost_peer() -> None:
    """A process group of torch's makes copies of what it gathers."""
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"), peers_needed():
        torch.empty(2**50)
    with pytest.raises(WorkerDied, match="lost contact with another rank: Connection closed"), peers_needed():
        raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("name", ["d" * 20, "d" * 60, "d" * 90])
def test_paths_of_sockets_are_short_enough(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix=name, dir="/tmp") as parent:
        monkeypatch.setattr("tempfile.tempdir", parent)
        folder = make_run_folder()
        try:
            Listener(str(folder / "rendezvous-99.15"), "AF_UNIX").close()
        finally:
            folder.rmdir()
