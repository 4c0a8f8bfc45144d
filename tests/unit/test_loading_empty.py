"""Pipelines without weights, and the estimate of memory made from them."""

from __future__ import annotations

import json
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file, save, save_file

from diffgen.args import ModelArgs, RunArgs
from diffgen.distributed.dims import ParallelDims, choose_dims
from diffgen.distributed.layout import empty_layout
from diffgen.errors import InvalidRequest, ModelError, StartFailed
from diffgen.loading.estimate import estimate_memory
from diffgen.loading.hub import resolve_model
from diffgen.loading.index import read_index
from diffgen.loading.memory import RequestMemory, available_bytes, check_weights, weight_bytes
from diffgen.params import Limits, SamplingParams, resolve
from diffgen.scheduler.job import Need
from diffgen.server.rank import open_pipeline
from pipelines.registry import FAMILIES, find_family


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_model_without_weights_is_like_one_with_them(tiny_wan22: Path, dtype: str) -> None:
    model = ModelArgs(model_path=str(tiny_wan22), dtype=dtype)  # type: ignore[arg-type]
    empty = open_pipeline(tiny_wan22, model, torch.device("meta"))
    full = open_pipeline(tiny_wan22, model, torch.device("cpu"))
    assert empty.spec == full.spec
    for name, part in full.pipe.components.items():
        if isinstance(part, torch.nn.Module):
            ours = {key: (value.shape, value.dtype) for key, value in empty.pipe.components[name].named_parameters()}
            assert ours == {key: (value.shape, value.dtype) for key, value in part.named_parameters()}
            assert all(value.is_meta for value in empty.pipe.components[name].parameters())


@pytest.mark.slow
def test_the_estimate_is_its_formula(tiny_wan: Path) -> None:
    pipeline = open_pipeline(tiny_wan, ModelArgs(model_path=str(tiny_wan)), torch.device("meta"))
    asked = SamplingParams(prompt="a", width=256, height=512, num_frames=9, num_outputs_per_prompt=2)
    params = resolve(asked, pipeline.spec, Limits()).params
    found = estimate_memory(pipeline, params)
    models = {name: part for name, part in pipeline.pipe.components.items() if isinstance(part, torch.nn.Module)}
    sizes = {
        name: sum(each.numel() * each.element_size() for each in part.parameters()) for name, part in models.items()
    }
    assert found["weights"] == {name: round(size / 2**20, 1) for name, size in sizes.items()}
    outputs, branches, positions = 2, 2, 3 * 64 * 32  # latent frames, rows and columns
    channels, widest = pipeline.pipe.transformer.config.in_channels, pipeline.pipe.transformer.config.ffn_dim
    mib = {
        "latents": outputs * channels * positions * 4 * (2 + branches),
        "denoise": 3 * outputs * branches * (positions // 4) * widest * 4,
        "pixels": outputs * 9 * 256 * 512 * 3,
    }
    for name, size in mib.items():
        assert found[name] == pytest.approx(size / 2**20, abs=0.051), name
    # The last layer reads two tensors at full resolution, of four frames: its padded input and what it was made from.
    full = outputs * 4 * 256 * 512 * pipeline.pipe.vae.decoder.conv_out.in_channels * 4 / 2**20
    assert 2 * full < found["decode"] < 20 * full
    work = (sum(sizes.values()) + mib["latents"] + mib["pixels"]) / 2**20 + max(found["denoise"], found["decode"])
    assert found["total"] == pytest.approx(work, abs=0.2)
    unguided = estimate_memory(pipeline, msgspec.structs.replace(params, guidance_scale=1.0))
    assert unguided["denoise"] == pytest.approx(found["denoise"] / 2, abs=0.1)


@pytest.mark.slow
def test_weights_are_counted_from_their_files_and_refused_where_they_cannot_fit(tiny_wan: Path) -> None:
    cpu, model = torch.device("cpu"), ModelArgs(model_path=str(tiny_wan))
    pipeline = open_pipeline(tiny_wan, model, torch.device("meta"))
    models = [part for part in pipeline.pipe.components.values() if isinstance(part, torch.nn.Module)]
    count = sum(each.numel() for part in models for each in part.parameters())
    assert weight_bytes(tiny_wan, model, cpu) == pytest.approx(4 * count, rel=0.02), "but for what is tied"
    half = msgspec.structs.replace(model, dtype="float16")
    assert weight_bytes(tiny_wan, half, cpu) == weight_bytes(tiny_wan, model, cpu) // 2
    check_weights(tiny_wan, model, cpu, ranks=2)
    with pytest.raises(StartFailed, match=r"weights of .* take \d+ MiB and each of 1000000 rank") as caught:
        check_weights(tiny_wan, model, cpu, ranks=1_000_000)
    assert caught.value.code == "insufficient_memory"


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "run git lfs pull"),
        (b"", "get it again"),
        (save({"a": torch.zeros(4)})[:-1], "get it again"),
        ((2**60).to_bytes(8, "little") + b"{}", "get it again"),
    ],
)
def test_a_file_of_weights_that_is_not_whole_is_named(tmp_path: Path, content: bytes, remedy: str) -> None:
    index = {"_class_name": "WanPipeline", "vae": ["diffusers", "AutoencoderKLWan"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text("{}")
    (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"vae/diffusion_pytorch_model\.safetensors is no whole .*" + remedy) as caught:
        check_weights(tmp_path, ModelArgs(model_path=str(tmp_path)), torch.device("cpu"), ranks=1)
    assert caught.value.code == "model_incomplete"


@pytest.mark.slow
@pytest.mark.parametrize("component", ["text_encoder", "transformer"])
def test_weights_that_lack_some_are_refused(tiny_wan: Path, tmp_path: Path, component: str) -> None:
    """In their place would be others, random or none."""
    folder = shutil.copytree(tiny_wan, tmp_path / "model")
    (path,) = (folder / component).glob("*.safetensors")
    weights = load_file(path)
    name = next(each for each in weights if each.endswith(".weight") and ".0." in each)
    del weights[name]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"the weights in .*/{component} lack 1: {name}") as caught:
        open_pipeline(folder, ModelArgs(model_path=str(folder)), torch.device("cpu"))
    assert caught.value.code == "model_incomplete"


SHARED, TIED = "shared.weight", "encoder.embed_tokens.weight"


@pytest.mark.slow
@pytest.mark.parametrize("names", [(SHARED,), (TIED,), (SHARED, TIED)], ids=["one", "the-other", "both"])
def test_tied_weights_have_either_name(tiny_wan: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    """As transformers has it, also where a rank reads slices: what has both, with other values, is not tied."""
    folder = shutil.copytree(tiny_wan, tmp_path / "model")
    path = folder / "text_encoder" / "model.safetensors"
    weights = load_file(path)
    values = weights.pop(SHARED)
    stored = {name: values * (1 + index) for index, name in enumerate(names)}
    save_file(weights | stored, path, metadata={"format": "pt"})
    for tp in (1, 2):
        layout = empty_layout(ParallelDims(tp=tp))
        model = ModelArgs(model_path=str(folder))
        pipeline = open_pipeline(folder, model, torch.device("cpu"), lambda *args, layout=layout: layout)
        encoder = pipeline.pipe.text_encoder
        assert torch.equal(encoder.shared.weight, values)
        assert torch.equal(encoder.encoder.embed_tokens.weight, stored[names[-1]])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit holds on Linux")
def test_memory_that_runs_out_while_loading_is_told_as_such(tiny_wan: Path, tmp_path: Path) -> None:
    import resource

    width = 2**19
    folder = shutil.copytree(tiny_wan, tmp_path / "model")
    config = json.loads((folder / "transformer" / "config.json").read_text())
    (folder / "transformer" / "config.json").write_text(json.dumps(config | {"text_dim": width}))
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights, name = load_file(path), "condition_embedder.text_embedder.linear_1.weight"
    # Only as float32 it is too large.
    weights[name] = torch.zeros(len(weights[name]), width, dtype=torch.float16)
    save_file(weights, path, metadata={"format": "pt"})
    del weights
    open_pipeline(tiny_wan, ModelArgs(model_path=str(tiny_wan)), torch.device("cpu"))  # what is imported on the way
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**26, before[1]))
    try:
        with pytest.raises(StartFailed, match=r"out of memory on cpu while loading .*; use a smaller dtype") as caught:
            open_pipeline(folder, ModelArgs(model_path=str(folder)), torch.device("cpu"))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert caught.value.code == "insufficient_memory"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("CogVideoXDPMScheduler", "missing 2 required positional arguments: 'timestep_back' and 'sample'"),
        ("DDIMScheduler", "prediction_type given as flow_prediction must be one of"),
    ],
)
def test_a_scheduler_that_cannot_drive_the_model_is_refused(
    tiny_wan: Path, tmp_path: Path, name: str, reason: str
) -> None:
    folder = shutil.copytree(tiny_wan, tmp_path / "model")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"scheduler": ["diffusers", name]}))
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps({"prediction_type": "flow_prediction"}))
    with pytest.raises(ModelError, match=rf"its scheduler, {name}, cannot drive a WanPipeline .*{reason}") as caught:
        open_pipeline(folder, ModelArgs(model_path=str(folder)), torch.device("cpu"))
    assert caught.value.code == "unsupported_model"


@pytest.mark.slow
def test_a_variant_is_loaded_whole(tiny_wan: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_wan, tmp_path / "model")
    for path in folder.rglob("*.safetensors"):
        path.rename(path.with_suffix(".fp16.safetensors"))
    (folder / "text_encoder" / "LICENSE").touch()  # by whose name alone diffusers could tell no variant
    plain, variant = (
        open_pipeline(each, ModelArgs(model_path=str(each), variant=name), torch.device("cpu")).pipe.components
        for each, name in ((tiny_wan, None), (folder, "fp16"))
    )
    for name in ("text_encoder", "transformer", "vae"):
        ours, theirs = variant[name].state_dict(), plain[name].state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defaults", "problem"),
    [
        ({"width": 500}, "width 500 must be a multiple of 16 for wan; nearest: 496 or 512"),
        ({"num_frames": 8}, "num_frames 8 must be 1 or a multiple of 4 plus 1"),
        ({"clip_skip": 1}, "wan takes no clip_skip"),
        ({"scheduler": "ddim"}, "scheduler 'ddim' is not known"),
    ],
)
def test_defaults_that_the_model_would_refuse_are_refused(
    tiny_wan: Path, tmp_path: Path, defaults: dict[str, Any], problem: str
) -> None:
    folder = shutil.copytree(tiny_wan, tmp_path / "model")
    (folder / "diffgen.json").write_text(json.dumps({"defaults": {"preview_every": 2} | defaults}))
    with pytest.raises(ModelError, match=problem) as caught:
        open_pipeline(folder, ModelArgs(model_path=str(folder)), torch.device("meta"))
    assert "diffgen.json" in caught.value.message


@pytest.mark.slow
def test_a_request_is_looked_at_where_it_is_not_small(tiny_wan: Path) -> None:
    pipeline = open_pipeline(tiny_wan, ModelArgs(model_path=str(tiny_wan)), torch.device("meta"))
    opened: list[int] = []
    memory = RequestMemory(torch.device("cpu"), 1, lambda: opened.append(1) or pipeline)
    params = resolve(SamplingParams(prompt="a", width=256, height=256, seed=3), pipeline.spec, Limits()).params
    assert memory.needs(params, 10**12) == Need(0, 0)
    assert not opened, "plenty is there"
    need, found = memory.needs(params, 10**6), estimate_memory(pipeline, params)
    assert need.held == pytest.approx((found["latents"] + found["pixels"]) * 2**20, abs=1)
    assert need.work == pytest.approx(max(found["denoise"], found["decode"]) * 2**20, abs=1)
    memory.needs(msgspec.structs.replace(params, prompt="b", seed=4), 10**6)
    assert opened == [1]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = memory.available()
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        assert memory.available() == before, "strangers' connections may take all descriptors"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    broken = RequestMemory(torch.device("cpu"), 1, lambda: opened.append(1))
    assert [broken.needs(params, 10**6) for _ in range(2)] == [None, None], "it is told, and not a failure"
    assert 0 < memory.available() == pytest.approx(available_bytes(torch.device("cpu")), rel=0.2)


@pytest.mark.slow
def test_num_gpus_alone_fits_the_bundled_model() -> None:
    """Whatever the number, each rank has a part of the work, and the words say which."""
    index = read_index(resolve_model(ModelArgs()), None, False)
    abilities = find_family(FAMILIES["wan"]).abilities(index)
    for count in range(2, 13):
        dims, why = choose_dims(RunArgs(num_gpus=count), abilities, index.pipeline_class)
        assert (dims.world, dims.tp, dims.cfg) == (count, 1, 2 if count % 2 == 0 else 1)
        assert abilities.heads % dims.ulysses == 0
        for axis in ("ulysses", "ring"):
            size = getattr(dims, axis)
            assert (f"{axis} {size}" in why) == (size > 1), why
    for name in ("tp_size", "ulysses_degree"):
        with pytest.raises(InvalidRequest, match=rf"{abilities.heads} attention heads, which do not divide by .*legal"):
            choose_dims(RunArgs(num_gpus=5, **{name: 5}), abilities, index.pipeline_class)


@pytest.mark.slow
def test_the_estimate_knows_the_layout(tiny_wan: Path) -> None:
    def estimated(dims: ParallelDims, **sizes: int) -> dict[str, Any]:
        layout = empty_layout(dims)
        model = ModelArgs(model_path=str(tiny_wan))
        pipeline = open_pipeline(tiny_wan, model, torch.device("meta"), lambda abilities, name: layout)
        asked = SamplingParams(prompt="a", width=256, height=512, num_frames=5, **sizes)
        return estimate_memory(pipeline, resolve(asked, pipeline.spec, Limits()).params)

    whole, three = estimated(ParallelDims()), estimated(ParallelDims(), num_outputs_per_prompt=3)
    rows, tokens, slices = (estimated(dims) for dims in (ParallelDims(cfg=2), ParallelDims(ring=2), ParallelDims(tp=2)))
    for split in (rows, tokens, slices):
        assert split["denoise"] == pytest.approx(whole["denoise"] / 2, abs=0.1)
        assert (split["latents"], split["pixels"]) == (whole["latents"], whole["pixels"])
        # A row of the neighbour's comes on top, and the whole picture at the end.
        assert 1 / 2 < split["decode"] / whole["decode"] < 3 / 4
    assert rows["weights"] == tokens["weights"] == whole["weights"]
    assert 1 / 2 < slices["weights"]["transformer"] / whole["weights"]["transformer"] < 3 / 4
    # Of six rows two are the first group's, and of three outputs one.
    four = estimated(ParallelDims(cfg=4), num_outputs_per_prompt=3)
    assert four["denoise"] == pytest.approx(three["denoise"] / 3, abs=0.1)
    assert 1 / 4 < four["decode"] / three["decode"] < 1 / 2
