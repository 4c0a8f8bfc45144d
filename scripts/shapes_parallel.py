"""Training by workers that share one memory.

On a few cores, workers of one thread each are much faster than one process of many threads. Parameters, gradients,
moments and the moving average are flat tensors in shared memory; each worker computes the gradients of its own part of
a batch, then updates its own slice of the parameters. A task may have its matrices updated by Muon (Jordan et al. 2024,
"Muon: An optimizer for hidden layers in neural networks"), which learns more from a step than Adam; they lie first, in
stacks of one shape.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.optim.adam import adam

AVERAGE_EVERY = 5  # steps between two updates of the moving average
MUON_MOMENTUM = 0.95


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

    def matrices(self, model: nn.Module) -> list[nn.Parameter]:
        """The matrices that Muon updates; Adam updates all the rest."""

    def prepare(self, model: nn.Module, worker: int) -> None:
        """Get a worker's model and data ready."""

    def loss(self, model: nn.Module, step: int, worker: int) -> tuple[Tensor, float]:
        """The loss of a worker's part of a step's batch, and the number to log."""

    def rate(self, step: int) -> float:
        """The learning rate of a step."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The order of a model's parameters in a flat tensor: stacks (start, count, rows, columns) of matrices, then the
    rest, from `rest` on."""

    parameters: list[nn.Parameter]
    stacks: list[tuple[int, int, int, int]]
    rest: int
    size: int


def lay_out(task: Task, model: nn.Module) -> Layout:
    """Where the parameters of a task's model lie."""
    shapes: dict[torch.Size, list[nn.Parameter]] = {}
    for matrix in task.matrices(model):
        shapes.setdefault(matrix.shape, []).append(matrix)
    stacks, ordered, start = [], [], 0
    for shape, alike in shapes.items():
        stacks.append((start, len(alike), *shape))
        ordered += alike
        start += len(alike) * shape.numel()
    laid = set(map(id, ordered))
    ordered += [parameter for parameter in model.parameters() if id(parameter) not in laid]
    return Layout(ordered, stacks, start, sum(parameter.numel() for parameter in ordered))


class Shared:
    """The flat tensors that all workers see: parameters, moments, average, and each worker's gradients and norm."""

    def __init__(self, size: int, workers: int) -> None:
        self.parameters, self.first, self.second, self.average = (torch.zeros(size).share_memory_() for _ in range(4))
        self.gradients = torch.zeros(workers, size).share_memory_()
        self.norms = torch.zeros(workers).share_memory_()
        self.losses = torch.zeros(workers).share_memory_()

    def attach(self, layout: Layout, worker: int) -> None:
        """Make parameters and gradients views of the flat tensors."""
        start = 0
        for parameter in layout.parameters:
            stop = start + parameter.numel()
            parameter.data = self.parameters[start:stop].view_as(parameter)
            parameter.grad = self.gradients[worker, start:stop].view_as(parameter)
            start = stop

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        return {name: getattr(self, name) for name in ("parameters", "first", "second", "average")}


def flatten(layout: Layout) -> Tensor:
    """The parameters as one tensor (size,)."""
    return torch.cat([parameter.detach().flatten() for parameter in layout.parameters])


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest matrices (count, rows, columns) of singular values about one: Muon's Newton-Schulz iteration.

    One matrix at a time: on a CPU torch multiplies batches of this size more slowly.
    """
    turned = matrices.mT if matrices.shape[1] > matrices.shape[2] else matrices
    out = torch.empty_like(turned)
    for matrix, result in zip(turned, out, strict=True):
        x = matrix / (matrix.norm() + 1e-7)
        for _ in range(5):
            square = x @ x.T
            x = torch.addmm(x, torch.addmm(square, square, square, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
        result.copy_(x)
    return out.mT if turned is not matrices else out


def muon(parameters: Tensor, gradients: Tensor, momenta: Tensor, rate: float) -> None:
    """One step of Muon on matrices (count, rows, columns); `rate` is what Adam would take.

    The factor gives an update the size of Adam's (Liu et al. 2025, "Muon is Scalable for LLM Training").
    """
    momenta.lerp_(gradients, 1 - MUON_MOMENTUM)
    step = orthogonal(gradients.lerp(momenta, MUON_MOMENTUM))
    parameters.sub_(step, alpha=rate * 0.2 * max(parameters.shape[1:]) ** 0.5)


def shares(layout: Layout, workers: int, worker: int) -> tuple[list[tuple[int, int, int, int]], slice]:
    """What a worker updates: a part of each stack, and a slice of the rest."""
    stacks = []
    for start, count, rows, columns in layout.stacks:
        low, high = count * worker // workers, count * (worker + 1) // workers
        if high > low:
            stacks.append((start + low * rows * columns, high - low, rows, columns))
    rest = layout.size - layout.rest
    return stacks, slice(layout.rest + rest * worker // workers, layout.rest + rest * (worker + 1) // workers)


@torch.no_grad()
def update(shared: Shared, layout: Layout, task: Task, step: int, worker: int, barrier: Any) -> None:
    """One step of Muon and Adam, and one of the average, on a worker's share of the flat tensors."""
    stacks, rest = shares(layout, task.workers, worker)
    parts = [slice(start, start + count * rows * columns) for start, count, rows, columns in stacks] + [rest]
    gradients = [shared.gradients[:, part].mean(0) for part in parts]
    shared.norms[worker] = sum(gradient.dot(gradient) for gradient in gradients)
    barrier.wait()
    scale = min(task.clip / (shared.norms.sum().sqrt().item() + 1e-6), 1.0)
    rate = task.rate(step)
    for (_, *shape), part, gradient in zip(stacks, parts, gradients, strict=False):
        weights, momenta = (flat[part].view(shape) for flat in (shared.parameters, shared.first))
        muon(weights, gradient.mul_(scale).view(shape), momenta, rate)
    adam(
        *([shared.parameters[rest]], [gradients[-1].mul_(scale)], [shared.first[rest]], [shared.second[rest]], []),
        [torch.tensor(float(step))],
        fused=True,
        foreach=False,
        amsgrad=False,
        maximize=False,
        weight_decay=0.0,
        eps=1e-8,
        beta1=task.betas[0],
        beta2=task.betas[1],
        lr=rate,
    )
    if (step + 1) % AVERAGE_EVERY == 0:
        decay = min(task.ema, (1 + step) / (10 + step)) ** AVERAGE_EVERY
        for part in parts:
            shared.average[part].lerp_(shared.parameters[part], 1 - decay)


def save(path: Path, shared: Shared, step: int) -> None:
    """Write a checkpoint; an interrupted write leaves the one before it."""
    torch.save({"step": step, **shared.state()}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def run_worker(worker: int, task: Task, shared: Shared, start: int, barrier: Any) -> None:
    """One worker's share of a training from step `start` on."""
    torch.set_num_threads(1)
    model = task.build()
    layout = lay_out(task, model)
    shared.attach(layout, worker)
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
        update(shared, layout, task, step, worker, barrier)
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
    layout = lay_out(task, model)
    shared = Shared(layout.size, 1)
    shared.parameters.copy_(flatten(layout))
    shared.average.copy_(shared.parameters)
    save(checkpoint(task.folder, task.name), shared, step)


def checkpoint(folder: Path, name: str) -> Path:
    """Where a training keeps its checkpoint."""
    return folder / f"{name}.pt"


def train(task: Task) -> None:
    """Run a training to its end, going on from its checkpoint if there is one."""
    layout = lay_out(task, task.build())
    shared = Shared(layout.size, task.workers)
    start = 0
    path = checkpoint(task.folder, task.name)
    if path.exists():
        saved = torch.load(path, weights_only=True)
        start = saved.pop("step")
        for name, value in saved.items():
            getattr(shared, name).copy_(value)
    else:
        shared.parameters.copy_(flatten(layout))
        shared.average.copy_(shared.parameters)
    print(f"{task.name}: {shared.parameters.numel() / 1e6:.2f} M parameters, from step {start}", flush=True)
    # A worker that waits much longer than any step or encoding takes has lost its peer.
    barrier = mp.get_context("spawn").Barrier(task.workers, timeout=3600)
    mp.spawn(run_worker, (task, shared, start, barrier), nprocs=task.workers)


@torch.no_grad()
def load_average(task: Task) -> Any:
    """A task's model with the averaged parameters of its checkpoint, frozen."""
    model = task.build()
    flat = torch.load(checkpoint(task.folder, task.name), weights_only=True)["average"]
    start = 0
    for parameter in lay_out(task, model).parameters:
        parameter.copy_(flat[start : start + parameter.numel()].view_as(parameter))
        start += parameter.numel()
    return model.eval().requires_grad_(False)
