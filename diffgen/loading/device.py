"""Which device a rank uses, with how many threads and in which numbers."""

from __future__ import annotations

import os
import sys

import torch

from diffgen.args import RunArgs
from diffgen.distributed.groups import RankInfo
from diffgen.errors import StartFailed


def choose_device(run: RunArgs, info: RankInfo, first: int = 0, others: int = 0) -> torch.device:
    """This rank's device, on CUDA that number ``first`` + rank; sets it up, and the CPU's threads.

    Ranks of other replicas, ``others``, have their share of the cores. Raises :class:`StartFailed` where there are too
    few devices.
    """
    # Ranks of one machine talk on the loopback interface.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores() // (info.size + others)))
    count = torch.cuda.device_count()
    if (run.device or ("cuda" if count else "cpu")) == "cpu":
        return torch.device("cpu")
    if count < first + info.size:
        raise StartFailed(too_few(count, info.size, first, others))
    device = torch.device("cuda", first + info.rank)
    torch.cuda.set_device(device)
    return device


def too_few(count: int, size: int, first: int, others: int) -> str:
    """That ``count`` devices do not suffice for ``size`` ranks from the ``first`` on, and what they suffice for."""
    needed, replicas = f"num_gpus={size}", ""
    if others:
        needed = f"a replica needs the devices {first} to {first + size - 1}"
        replicas = f" with dp_size={count // size or 1}"
    fits = count // size * size or count
    remedy = f"nearest: num_gpus={fits}{replicas}, or device='cpu'" if fits else "use device='cpu'"
    return f"{needed} but there are {count} CUDA devices; {remedy}"


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16
