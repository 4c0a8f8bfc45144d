"""Devices and threads of a rank."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest

from diffgen.loading.device import too_few


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ((0, 2, 0, 0), "num_gpus=2 but there are 0 CUDA devices; use device='cpu'"),
        ((3, 4, 0, 0), "num_gpus=4 but there are 3 CUDA devices; nearest: num_gpus=3, or"),
        (
            (5, 2, 4, 4),
            "a replica needs the devices 4 to 5 but there are 5 CUDA devices; nearest: num_gpus=4 with dp_size=2",
        ),
        (
            (3, 4, 0, 4),
            "a replica needs the devices 0 to 3 but there are 3 CUDA devices; nearest: num_gpus=3 with dp_size=1",
        ),
    ],
)
def test_too_few_devices_are_told_with_what_they_suffice_for(place: tuple[int, int, int, int], words: str) -> None:
    assert words in too_few(*place)


_THREADS = """
import torch
from diffgen.args import RunArgs
from diffgen.distributed.groups import RankInfo
from diffgen.errors import StartFailed
from diffgen.loading.device import choose_device
torch.set_num_threads(7)
choose_device(RunArgs(device="cpu"), RankInfo(0, 1), 0, 1000)
shared = torch.get_num_threads()
try:
    choose_device(RunArgs(device="cuda", threads=3), RankInfo(0, 1000))
except StartFailed:
    print(shared, torch.get_num_threads())
"""


def test_threads_are_shared_out_over_all_replicas_and_those_asked_for_hold_on_any_device(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_python(_THREADS, env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"})
    assert done.stdout.split() == ["1", "3"], done.stderr
