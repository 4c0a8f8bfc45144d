"""Training by workers that share one memory.

On a few cores, workers of one thread each are much faster than one process of many threads. Parameters, gradients,
moments and the moving average are flat tensors in shared memory; each worker computes the gradients of its own part of
a batch, then updates its own slice of the parameters.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.optim.adam import adam

AVERAGE_EVERY = 5  # steps between two updates of the moving average


class Task(Protocol):
    """A training that workers run; it is pickled into each of them."""

    name: str
    folder: Path
    steps: int
    workers: int
    betas: tuple[float, float]
    clip: float
    ema: float

    def build(self) -> nn.Module:
        """A fresh model."""

    def prepare(self, model: nn.Module, worker: int) -> None:
        """Get a worker's model and data ready."""

    def loss(self, model: nn.Module, step: int, worker: int) -> tuple[Tensor, float]:
        """The loss of a worker's part of a step's batch, and the number to log."""

    def rate(self, step: int) -> float:
        """The learning rate of a step."""


class Shared:
    """The flat tensors that all workers see: parameters, moments, average, and each worker's gradients and norm."""

    def __init__(self, size: int, workers: int) -> None:
        self.parameters, self.first, self.second, self.average = (torch.zeros(size).share_memory_() for _ in range(4))
        self.gradients = torch.zeros(workers, size).share_memory_()
        self.norms = torch.zeros(workers).share_memory_()
        self.losses = torch.zeros(workers).share_memory_()

    def attach(self, model: nn.Module, worker: int) -> None:
        """Make a model's parameters and gradients views of the flat tensors."""
        start = 0
        for parameter in model.parameters():
            stop = start + parameter.numel()
            parameter.data = self.parameters[start:stop].view_as(parameter)
            parameter.grad = self.gradients[worker, start:stop].view_as(parameter)
            start = stop

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        return {name: getattr(self, name) for name in ("parameters", "first", "second", "average")}


def unflatten(model: nn.Module, flat: Tensor) -> None:
    """Copy flat parameters (size,) into a model."""
    start = 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(flat[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()


@torch.no_grad()
def update(shared: Shared, task: Task, step: int, worker: int, barrier: Any) -> None:
    """One Adam step, and one of the average, on a worker's slice of the flat tensors."""
    size = shared.parameters.numel()
    part = slice(size * worker // task.workers, size * (worker + 1) // task.workers)
    gradient = shared.gradients[0, part].clone()
    for other in shared.gradients[1:, part]:
        gradient.add_(other)
    gradient.mul_(1 / task.workers)
    shared.norms[worker] = gradient.dot(gradient)
    barrier.wait()
    gradient.mul_(min(task.clip / (shared.norms.sum().sqrt().item() + 1e-6), 1.0))
    parameters = shared.parameters[part]
    adam(
        *([parameters], [gradient], [shared.first[part]], [shared.second[part]], [], [torch.tensor(float(step))]),
        fused=True,
        foreach=False,
        amsgrad=False,
        maximize=False,
        weight_decay=0.0,
        eps=1e-8,
        beta1=task.betas[0],
        beta2=task.betas[1],
        lr=task.rate(step),
    )
    if (step + 1) % AVERAGE_EVERY == 0:
        decay = min(task.ema, (1 + step) / (10 + step)) ** AVERAGE_EVERY
        shared.average[part].lerp_(parameters, 1 - decay)


def save(path: Path, shared: Shared, step: int) -> None:
    """Write a checkpoint; an interrupted write leaves the one before it."""
    torch.save({"step": step, **shared.state()}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def run_worker(worker: int, task: Task, shared: Shared, start: int, barrier: Any) -> None:
    """One worker's share of a training from step `start` on."""
    torch.set_num_threads(1)
    model = task.build()
    shared.attach(model, worker)
    task.prepare(model, worker)
    losses: list[float] = []
    began = time.monotonic()
    parent = os.getppid()
    for step in range(start, task.steps):
        if os.getppid() != parent:
            raise SystemExit(f"{task.name}: the process that began this training is gone")
        loss, logged = task.loss(model, step, worker)
        loss.backward()
        shared.losses[worker] = logged
        barrier.wait()
        losses.append(shared.losses.mean().item())
        update(shared, task, step, worker, barrier)
        barrier.wait()
        shared.gradients[worker].zero_()
        if worker == 0 and (step + 1) % 100 == 0:
            pace = (time.monotonic() - began) / (step + 1 - start)
            mean = sum(losses[-100:]) / len(losses[-100:])
            print(f"{task.name} {step + 1}/{task.steps} loss {mean:.5f} {pace:.3f} s a step", flush=True)
        if worker == 0 and ((step + 1) % 500 == 0 or step + 1 == task.steps):
            save(checkpoint(task.folder, task.name), shared, step + 1)


def write_start(task: Task, model: nn.Module, step: int) -> None:
    """Write a model as if it had been trained for some steps, for a training to go on from."""
    shared = Shared(sum(p.numel() for p in model.parameters()), 1)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    shared.parameters.copy_(flat)
    shared.average.copy_(flat)
    save(checkpoint(task.folder, task.name), shared, step)


def checkpoint(folder: Path, name: str) -> Path:
    """Where a training keeps its checkpoint."""
    return folder / f"{name}.pt"


def train(task: Task) -> None:
    """Run a training to its end, going on from its checkpoint if there is one."""
    model = task.build()
    shared = Shared(sum(p.numel() for p in model.parameters()), task.workers)
    start = 0
    path = checkpoint(task.folder, task.name)
    if path.exists():
        saved = torch.load(path, weights_only=True)
        start = saved.pop("step")
        for name, value in saved.items():
            getattr(shared, name).copy_(value)
    else:
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        shared.parameters.copy_(flat)
        shared.average.copy_(flat)
    print(f"{task.name}: {shared.parameters.numel() / 1e6:.2f} M parameters, from step {start}", flush=True)
    # A worker that waits much longer than any step or encoding takes has lost its peer.
    barrier = mp.get_context("spawn").Barrier(task.workers, timeout=3600)
    mp.spawn(run_worker, (task, shared, start, barrier), nprocs=task.workers)


def load_average(model: nn.Module, folder: Path, name: str) -> nn.Module:
    """A model with the averaged parameters of a checkpoint, frozen."""
    unflatten(model, torch.load(checkpoint(folder, name), weights_only=True)["average"])
    return model.eval().requires_grad_(False)
