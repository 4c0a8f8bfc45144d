"""Which device a rank uses, with how many threads and in which numbers."""

from __future__ import annotations

import os
import sys

import torch

from diffgen.args import RunArgs
from diffgen.distributed.groups import RankInfo
from diffgen.errors import StartFailed


def choose_device(run: RunArgs, info: RankInfo, first: int = 0) -> torch.device:
    """This rank's device, on CUDA that number ``first`` + rank; sets it up.

    Raises :class:`StartFailed` where there are too few.
    """
    count = torch.cuda.device_count()
    kind = run.device or ("cuda" if count else "cpu")
    if kind == "cuda":
        if count < first + info.size:
            last = first + info.size - 1
            needed = f"a replica needs the devices {first} to {last}" if first else f"num_gpus={info.size}"
            fits = count // info.size * info.size or count  # as many replicas as there can be
            remedy = f"nearest: num_gpus={fits}, or device='cpu'" if fits else "use device='cpu'"
            raise StartFailed(f"{needed} but there are {count} CUDA devices; {remedy}")
        device = torch.device("cuda", first + info.rank)
        torch.cuda.set_device(device)
        return device
    # Ranks of one machine talk on the loopback interface.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores() // info.size))
    return torch.device("cpu")


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16
