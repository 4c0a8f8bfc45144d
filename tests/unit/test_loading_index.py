"""What a model's folder says it holds, and whether that is there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from diffgen.errors import ModelError
from diffgen.loading.hub import BUNDLED
from diffgen.loading.index import read_index

INDEX = {
    "_class_name": "WanPipeline",
    "_diffusers_version": "0.42.1",
    "boundary_ratio": None,
    "expand_timesteps": False,
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "transformer_2": [None, None],
    "vae": ["diffusers", "AutoencoderKLWan"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete folder, with empty files for weights and shards in the transformer."""
    root = tmp_path / "model"
    contents: dict[str, dict[str, Any]] = {
        "": {"model_index.json": INDEX},
        "scheduler": {"scheduler_config.json": {}},
        "tokenizer": {"tokenizer.json": {}, "tokenizer_config.json": {}},
        "vae": {"config.json": {}, "diffusion_pytorch_model.safetensors": None},
        "transformer": {
            "config.json": {},
            "diffusion_pytorch_model.safetensors.index.json": {
                "weight_map": {f"w{i}": f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)}
            },
            "diffusion_pytorch_model-00001-of-00002.safetensors": None,
            "diffusion_pytorch_model-00002-of-00002.safetensors": None,
        },
    }
    for name, files in contents.items():
        (root / name).mkdir(exist_ok=True, parents=True)
        for file, content in files.items():
            (root / name / file).write_text("" if content is None else json.dumps(content))
    return root


def problem(folder: Path, variant: str | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        read_index(folder, variant)
    assert caught.value.code == "model_incomplete"
    assert str(folder) in caught.value.message
    return caught.value.message


def test_a_complete_folder_is_read(folder: Path) -> None:
    index = read_index(folder, None)
    assert index.pipeline_class == "WanPipeline"
    assert index.components == {
        "scheduler": ("diffusers", "UniPCMultistepScheduler"),
        "tokenizer": ("transformers", "T5TokenizerFast"),
        "transformer": ("diffusers", "WanTransformer3DModel"),
        "transformer_2": None,
        "vae": ("diffusers", "AutoencoderKLWan"),
    }
    assert index.defaults == {}


def test_the_bundled_model_is_complete() -> None:
    index = read_index(BUNDLED, None)
    assert index.defaults["num_inference_steps"] > 0


def test_no_index_says_what_was_found(folder: Path) -> None:
    (folder / "model_index.json").unlink()
    message = problem(folder)
    assert "no model_index.json" in message
    assert "scheduler, tokenizer, transformer, vae" in message


def test_an_empty_folder_says_so(tmp_path: Path) -> None:
    assert "found: nothing" in problem(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "\xff\xfe"])
def test_an_index_that_is_no_json_object_is_named(folder: Path, text: str) -> None:
    (folder / "model_index.json").write_bytes(text.encode("latin-1"))
    assert "model_index.json" in problem(folder)


def test_an_index_without_a_class_is_no_pipeline(folder: Path) -> None:
    (folder / "model_index.json").write_text("{}")
    assert "_class_name" in problem(folder)


def test_a_missing_component_is_named(folder: Path) -> None:
    shutil.rmtree(folder / "vae")
    assert "no folder vae/" in problem(folder)


@pytest.mark.parametrize("name", ["vae", "transformer"])
def test_a_missing_configuration_is_named(folder: Path, name: str) -> None:
    (folder / name / "config.json").unlink()
    message = problem(folder)
    assert f"no configuration in {name}/" in message or f"no {name}/config.json" in message


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "transformer" / "diffusion_pytorch_model-00002-of-00002.safetensors").unlink()
    assert "no transformer/diffusion_pytorch_model-00002-of-00002.safetensors" in problem(folder)


def test_shards_without_their_list_are_named(folder: Path) -> None:
    (folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json").unlink()
    assert "no *.safetensors.index.json in transformer/" in problem(folder)


def test_every_missing_piece_is_named_at_once(folder: Path) -> None:
    shutil.rmtree(folder / "scheduler")
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    message = problem(folder)
    assert "no folder scheduler/" in message
    assert "no *.safetensors in vae/" in message


@pytest.mark.parametrize("name", ["diffusion_pytorch_model.bin", "model.pt", "model.ckpt", "model.pkl", "model.pth"])
def test_weights_that_can_run_code_are_refused_with_the_remedy(folder: Path, name: str) -> None:
    (folder / "vae" / "diffusion_pytorch_model.safetensors").rename(folder / "vae" / name)
    message = problem(folder)
    assert f"vae/ has only {name}" in message
    assert "convert it to safetensors" in message


def test_a_variant_must_be_there(folder: Path) -> None:
    message = problem(folder, "fp16")
    assert "no weights of variant 'fp16' in vae/ (there: no variant)" in message


def test_a_folder_of_only_a_variant_says_which(folder: Path) -> None:
    vae = folder / "vae"
    (vae / "diffusion_pytorch_model.safetensors").rename(vae / "diffusion_pytorch_model.fp16.safetensors")
    assert "no weights without a variant in vae/ (there: variant 'fp16')" in problem(folder)


def test_a_complete_variant_is_read(folder: Path) -> None:
    vae, transformer = folder / "vae", folder / "transformer"
    (vae / "diffusion_pytorch_model.safetensors").rename(vae / "diffusion_pytorch_model.fp16.safetensors")
    for number in (1, 2):
        plain = transformer / f"diffusion_pytorch_model-0000{number}-of-00002.safetensors"
        plain.rename(transformer / f"diffusion_pytorch_model.fp16-0000{number}-of-00002.safetensors")
    names = {f"w{i}": f"diffusion_pytorch_model.fp16-0000{i}-of-00002.safetensors" for i in (1, 2)}
    index = transformer / "diffusion_pytorch_model.safetensors.index.json"
    index.unlink()
    (transformer / "diffusion_pytorch_model.safetensors.index.fp16.json").write_text(json.dumps({"weight_map": names}))
    read_index(folder, "fp16")
    (transformer / names["w1"]).unlink()
    assert names["w1"] in problem(folder, "fp16")


def _defaults(folder: Path, content: Any) -> dict[str, Any]:
    (folder / "diffgen.json").write_text(json.dumps(content))
    return read_index(folder, None).defaults


def test_a_models_own_defaults_are_read(folder: Path) -> None:
    assert _defaults(folder, {"defaults": {"width": 64, "guidance_scale": 0}}) == {"width": 64, "guidance_scale": 0}
    assert _defaults(folder, {}) == {}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"defaults": {"widht": 64}}, "did you mean 'width'"),
        ({"defaults": {"width": "64"}}, "width is '64'"),
        ({"defaults": {"width": -64}}, "width is -64"),
        ({"defaults": {"guidance_scale": 1e9}}, "guidance_scale"),
        ({"defaults": {"prompt": "a"}}, "unknown default 'prompt'"),
        ({"defaults": {"size": "64x64"}}, "unknown default 'size'"),
        ({"defaults": {"seed": 1}}, "unknown default 'seed'"),
        ({"defaults": ["width"]}, "defaults"),
        ({"default": {"width": 64}}, "['default']"),
    ],
)
def test_defaults_that_are_no_parameters_are_refused(folder: Path, content: Any, named: str) -> None:
    with pytest.raises(ModelError) as caught:
        _defaults(folder, content)
    assert "diffgen.json" in caught.value.message
    assert named in caught.value.message


def test_a_safety_checker_may_be_missing_unless_it_is_asked_for(folder: Path) -> None:
    path = folder / "model_index.json"
    index = json.loads(path.read_text())
    assert read_index(folder, None).left_out == frozenset()
    with pytest.raises(ModelError, match="has no safety checker"):
        read_index(folder, None, safety_checker=True)

    checker = {"safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"]}
    extractor = {"feature_extractor": ["transformers", "CLIPImageProcessor"]}
    path.write_text(json.dumps(index | checker | extractor))
    assert read_index(folder, None).left_out == {"safety_checker", "feature_extractor"}
    with pytest.raises(ModelError, match=r"no folder safety_checker/; no folder feature_extractor/"):
        read_index(folder, None, safety_checker=True)

    path.write_text(json.dumps(index | {"safety_checker": [None, None]} | extractor))
    assert read_index(folder, None).left_out == {"safety_checker", "feature_extractor"}
    # Without a safety checker in the index, others may need it.
    path.write_text(json.dumps(index | extractor))
    with pytest.raises(ModelError, match="no folder feature_extractor/"):
        read_index(folder, None)
