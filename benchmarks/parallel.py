"""A denoising step in each layout against one rank: time, CPU, bytes and how far the result is away.

    python benchmarks/parallel.py [--model wan-15m] [--steps 6] [--world 2] [--layouts "tp 2,ulysses 2"] [--profile]

Each rank is a process with one thread, or a CUDA device with ``--device cuda``. The model is random, made on the device
by the rank itself, slice by slice. A step is one forward of two rows, as of a guided request; with ``--model wan-vae``
it is a decode. ``--profile`` tells what kinds of operations take the seconds of a step. Bars at two ranks, in CPU
seconds a rank: CFG 1.9, Ulysses 1.85, TP 1.8, Ring 1.65, decode 1.7.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from torch import profiler

from diffgen.args import RunArgs
from diffgen.distributed.axis import AxisGroup
from diffgen.distributed.decode import split_decode
from diffgen.distributed.dims import AXES, ParallelDims
from diffgen.distributed.groups import RankInfo, join
from diffgen.distributed.layout import Layout, make_layout, may_share_memory
from diffgen.distributed.rows import map_rows_over
from diffgen.distributed.sequence import split_tokens
from diffgen.distributed.tensor import TensorPlan, class_plan, fill_sliced
from diffgen.loading.components import set_dtype
from diffgen.loading.device import choose_device
from diffgen.worker.context import Row
from pipelines.wan import WanPipeline

# Class, its settings, shape of the latents of a row, text tokens and their width.
_WAN = {"patch_size": (1, 2, 2), "in_channels": 16, "out_channels": 16}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, ...], tuple[int, int]]] = {
    "wan-tiny": (
        "WanTransformer3DModel",
        {**_WAN, "num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "ffn_dim": 128, "text_dim": 32},
        (16, 1, 6, 10),
        (16, 32),
    ),
    "wan-15m": (
        "WanTransformer3DModel",
        {**_WAN, "num_attention_heads": 6, "attention_head_dim": 64, "num_layers": 6, "ffn_dim": 1536, "text_dim": 256},
        (16, 1, 64, 64),
        (64, 256),
    ),
    "wan-1.3b": (
        "WanTransformer3DModel",
        {**_WAN, "num_attention_heads": 12, "attention_head_dim": 128, "num_layers": 30, "ffn_dim": 8960}
        | {"text_dim": 4096},
        (16, 21, 60, 104),
        (512, 4096),
    ),
    "flux.1": ("FluxTransformer2DModel", {"guidance_embeds": True}, (4096, 64), (512, 4096)),
    # A decode of one picture of 256 x 256, whose rows are shared out over the ranks of any layout. It is as wide as the
    # published one: on a CPU torch gives a float32 convolution of one sample to oneDNN, five times faster than its own,
    # from 20,480 channels x frames x rows on, which half of a narrower one does not reach.
    "wan-vae": ("AutoencoderKLWan", {"base_dim": 96}, (16, 1, 32, 32), (1, 1)),
    "flux-tiny": (
        "FluxTransformer2DModel",
        {"in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4}
        | {"joint_attention_dim": 32, "pooled_projection_dim": 768, "axes_dims_rope": (4, 6, 6)}
        | {"guidance_embeds": True},
        (15, 16),
        (7, 32),
    ),
}


# Kinds of operations that a profile tells apart, by the start of torch's names. Everything else is norms, modulation,
# rotation, residuals: what reads and writes tokens and computes little.
_KINDS = {
    "convolutions": ("aten::mkldnn_conv", "aten::_slow_conv", "aten::slow_conv", "aten::thnn_conv"),
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mkldnn_linear"),
    "attention": ("aten::_scaled_dot", "aten::_flash"),
    "everything else": ("aten::",),
}


@dataclasses.dataclass(frozen=True)
class Job:
    model: str
    dims: ParallelDims
    steps: int
    device: str
    dtype: str
    backend: str = "native"  # of attention over split tokens
    rows: int = 2  # in one forward; 1 shows what another batch size does to the result
    profile: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="wan-15m")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--layouts", help="such as 'tp 2,ulysses 2 x ring 2'; one axis each when left out")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--attention-backend", choices=["native", "xfuser"], default="native", help="of split tokens")
    parser.add_argument("--profile", action="store_true", help="also a table of the kinds of operations, on a CPU")
    options = parser.parse_args()
    layouts = [parse_dims(text) for text in options.layouts.split(",")] if options.layouts else one_axis(options.world)
    if options.model == "wan-vae":
        layouts = [ParallelDims(cfg=options.world)]
    for dims in layouts:
        if why_not(options.model, dims):
            parser.error(f"{dims}: {why_not(options.model, dims)}")
    if options.profile and options.device != "cpu":
        parser.error("--profile reads the clock of the processor; on a device use its own profiler")
    table(
        options.model, layouts, options.steps, options.device, options.dtype, options.attention_backend,
        profile=options.profile,
    )  # fmt: skip


def one_axis(world: int) -> list[ParallelDims]:
    return [ParallelDims(**{axis: world}) for axis in reversed(AXES) if axis != "cfg" or world == 2]


def parse_dims(text: str) -> ParallelDims:
    """Of "ulysses 2 x ring 2"."""
    return ParallelDims(**{name: int(degree) for name, degree in (part.split() for part in text.split(" x "))})


def _name(dims: ParallelDims) -> str:
    return " x ".join(f"{axis} {degree}" for axis in AXES if (degree := getattr(dims, axis)) > 1)


def why_not(model: str, dims: ParallelDims) -> str:
    """Why a model cannot have a layout; empty where it can."""
    name, settings, _, _ = MODELS[model]
    if name.startswith("Autoencoder"):
        return "" if dims.cfg == dims.world else "a decode is split over all ranks alike; give cfg alone"
    default = inspect.signature(getattr(diffusers, name).__init__).parameters["num_attention_heads"].default
    heads = settings.get("num_attention_heads", default)
    return f"{model} has {heads} heads, for tp x ulysses" if heads % (dims.tp * dims.ulysses) else ""


def table(
    model: str,
    layouts: list[ParallelDims],
    steps: int,
    device: str,
    dtype: str,
    backend: str = "native",
    *,
    profile: bool = False,
) -> None:
    """Print a line a layout. The difference is mean and largest, relative to one rank's mean and largest value."""
    print(f"{model}, {steps} steps of two rows, {dtype} on {device}, one thread a rank\n")
    print("| layout | CPU seconds a rank | of it in collectives | wall | MB sent a rank | mean difference | largest |")
    print("|---|---|---|---|---|---|---|")
    alone, whole = run(Job(model, ParallelDims(), steps, device, dtype, profile=profile))
    single = run(Job(model, ParallelDims(), 1, device, dtype, rows=1))[1]
    one = " | ".join(f"{value}" for value in (f"{alone[0]['cpu']:.3f}", 0, f"{alone[0]['wall']:.3f}", 0))
    print(f"| one rank | {one} | two batch sizes: {_apart(single, whole)} |")
    slowest = {}
    for dims in layouts:
        ranks, output = run(Job(model, dims, steps, device, dtype, backend, profile=profile))
        slowest[dims] = max(ranks, key=lambda rank: rank["cpu"])
        cpu, wall, shared = (max(rank[name] for rank in ranks) for name in ("cpu", "wall", "collectives"))
        sent = max(rank["sent"] for rank in ranks) / 1e6
        gains = f"{cpu:.3f} ({alone[0]['cpu'] / cpu:.2f}x) | {shared:.3f} | {wall:.3f} ({alone[0]['wall'] / wall:.2f}x)"
        print(f"| {_name(dims)} | {gains} | {sent:.2f} | {_apart(output, whole)} |", flush=True)
    if profile:
        print("\nSeconds of a step by the kind of operation, on the slowest rank, and how much less than on one rank\n")
        names = "".join(f" {_name(dims)} |" for dims in layouts)
        print(f"| kind | one rank |{names}\n|---|---|{'---|' * len(layouts)}")
        for kind in [kind for kind in _KINDS if alone[0][kind] > 0]:
            shares = (f" {rank[kind]:.3f} ({alone[0][kind] / rank[kind]:.2f}x) |" for rank in slowest.values())
            print(f"| {kind} | {alone[0][kind]:.3f} |{''.join(shares)}")


def _apart(output: torch.Tensor, whole: torch.Tensor) -> str:
    difference = (output - whole).abs()
    return f"{difference.mean() / whole.abs().mean():.1e} | {difference.max() / whole.abs().max():.1e}"


def run(job: Job) -> tuple[list[dict[str, float]], torch.Tensor]:
    """Each rank's medians a step, and the prediction (rows, ...) in float32."""
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(dataclasses.asdict(job))
        command = [sys.executable, __file__, "--rank"]
        quiet = os.environ | {"TRANSFORMERS_VERBOSITY": "error"}  # about what it could use and does not find
        # What libraries print, as NCCL and xfuser do to stdout, is not for the table.
        ranks = [
            subprocess.Popen([*command, text, str(rank), folder], env=quiet, stdout=sys.stderr)
            for rank in range(job.dims.world)
        ]
        try:
            # Peers of a rank that has failed may wait for it in a collective for as long as they like.
            while any(each.poll() is None for each in ranks) and not any(each.returncode for each in ranks):
                time.sleep(0.1)
            if any(each.returncode for each in ranks):
                raise SystemExit(f"a rank of {job} failed")
            medians = [json.loads(Path(folder, f"rank{rank}").read_text()) for rank in range(job.dims.world)]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return medians, torch.load(f"{folder}/output", weights_only=True)


def _rank(job: Job, rank: int, folder: Path) -> None:
    info = RankInfo(rank, job.dims.world)
    device = choose_device(RunArgs(device=job.device, threads=1), info)
    shares_memory = may_share_memory(device)
    control = join(info, folder / "rendezvous", None if shares_memory else device)
    shared = control if shares_memory else None
    layout = make_layout(job.dims, info, device, attention_backend=job.backend, control=shared)
    model = _model(job, layout, device)
    inputs = [_inputs(job.model, index, device, model.dtype) for index in range(2)]
    rows = [Row(latents, torch.tensor(500.0, device=device), branch, "") for latents, branch in inputs]

    def predict(share: Any) -> list[torch.Tensor]:
        if job.model == "wan-vae":
            return [model.decode(share[0].latents, return_dict=False)[0]]
        if len(share) > job.rows:
            return [each for row in share for each in predict([row])]
        latents = torch.cat([row.latents for row in share])
        branch = {name: torch.cat([row.branch[name] for row in share]) for name in share[0].branch}
        return list(_forward(job.model, model, latents, branch, device).split(1))

    def step() -> list[torch.Tensor]:
        if layout.cfg.size > 1 and job.model != "wan-vae":
            return map_rows_over(layout.cfg, predict, rows, lambda predict, share: predict(share))
        return predict(rows)

    spent = _watch_collectives()
    times: list[tuple[float, float, int, float]] = []
    with torch.inference_mode():
        output = torch.cat(step())
        _finish(device)
        for _ in range(job.steps):
            before = sum(group.sent for group in layout.groups().values())
            shared, cpu, wall = spent[0], time.process_time(), time.perf_counter()
            step()
            _finish(device)
            sent = sum(group.sent for group in layout.groups().values()) - before
            times.append((time.process_time() - cpu, time.perf_counter() - wall, sent, spent[0] - shared))
        kinds = _by_kind(step, job.steps) if job.profile else {}
    if info.leads:
        torch.save(output.float().cpu(), folder / "output")
    medians = [statistics.median(values) for values in zip(*times, strict=True)]
    found = dict(zip(("cpu", "wall", "sent", "collectives"), medians, strict=True)) | kinds
    (folder / f"rank{rank}").write_text(json.dumps(found))
    control.gather_vote([rank])  # none leaves while a peer's device may still read its memory


def _by_kind(step: Callable[[], Any], steps: int) -> dict[str, float]:
    """Seconds of a step in each of `_KINDS`."""
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU]) as profiled:
        for _ in range(steps):
            step()
    spent = dict.fromkeys(_KINDS, 0.0)
    for event in profiled.key_averages():
        kind = next((kind for kind, names in _KINDS.items() if event.key.startswith(names)), None)
        if kind is not None:
            spent[kind] += event.self_cpu_time_total / 1e6 / steps
    return spent


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _watch_collectives() -> list[float]:
    """One number: CPU seconds of this process, with the threads of its backend, so far in collectives."""
    spent = [0.0]

    def timed(collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            before = time.process_time()
            try:
                return collective(*args)
            finally:
                spent[0] += time.process_time() - before

        return run

    for name in ("all_reduce", "all_gather", "all_to_all"):
        setattr(AxisGroup, name, timed(getattr(AxisGroup, name)))
    return spent


def _model(job: Job, layout: Layout, device: torch.device) -> Any:
    name, settings, _, _ = MODELS[job.model]
    kind = getattr(diffusers, name)
    with init_empty_weights():
        model = kind(**settings).eval()
    set_dtype(model, getattr(torch, job.dtype))
    plan = WanPipeline.tensor_plans["transformer"] if name.startswith("Wan") else class_plan(kind)
    sliced = plan if plan is not None and layout.tp.size > 1 else TensorPlan({})
    fill_sliced(model, _random_weights(model, device), sliced, layout.tp, name)
    model.to(device)
    if job.model == "wan-vae" and layout.decode.size > 1:
        split_decode(model, layout.decode)
    if layout.attention is not None:
        split_tokens(model, layout.sequence, layout.attention)
    return model


class _Weight:
    """A whole weight, made when it is sliced."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._name, self._shape, self._dtype, self._device = name, shape, dtype, device

    def get_shape(self) -> tuple[int, ...]:
        return self._shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(self._name.encode()))
        values = torch.randn(self._shape, generator=generator, dtype=self._dtype, device=self._device)
        is_norm = len(self._shape) == 1 and "norm" in self._name and self._name.endswith("weight")
        whole = 1 + 0.1 * values if is_norm else values * max(self._shape[-1], 64) ** -0.5
        return whole[index].clone()


def _random_weights(model: torch.nn.Module, device: torch.device) -> Iterator[tuple[str, _Weight]]:
    for name, parameter in model.named_parameters():
        yield name, _Weight(name, tuple(parameter.shape), parameter.dtype, device)


def _inputs(model: str, index: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, Any]]:
    _, _, shape, text = MODELS[model]
    generator = torch.Generator().manual_seed(index)
    latents = torch.randn(1, *shape, generator=generator).to(device, dtype)
    branch = {"encoder_hidden_states": torch.randn(1, *text, generator=generator).to(device, dtype)}
    if model.startswith("flux"):
        branch["pooled_projections"] = torch.randn(1, 768, generator=generator).to(device, dtype)
    return latents, branch


def _forward(
    name: str, model: Any, latents: torch.Tensor, branch: dict[str, torch.Tensor], device: torch.device
) -> torch.Tensor:
    timestep = torch.full((len(latents),), 500.0, device=device)
    if name.startswith("wan"):
        return model(latents, timestep, return_dict=False, **branch)[0]  # type: ignore[no-any-return]
    text, tokens = branch["encoder_hidden_states"].shape[1], torch.arange(latents.shape[1], device=device)
    ids = torch.stack([torch.zeros_like(tokens), tokens // 64, tokens % 64], dim=1).float()
    guidance = torch.full((len(latents),), 3.5, device=device)
    positions = {"img_ids": ids, "txt_ids": torch.zeros(text, 3, device=device), "guidance": guidance}
    return model(latents, timestep=timestep / 1000, return_dict=False, **branch, **positions)[0]  # type: ignore[no-any-return]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        values = json.loads(sys.argv[2])
        _rank(Job(**{**values, "dims": ParallelDims(**values["dims"])}), int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main()
