"""Which family serves a model. No weights are loaded here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diffgen.args import ModelArgs
from diffgen.errors import ModelError
from pipelines.base import ComposedPipelineBase
from pipelines.registry import FAMILIES, SERVED, find_family, import_family, load_pipeline

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "UnheardOfPipeline"}))
    return tmp_path


def test_every_registered_family_can_be_imported_and_serves_what_the_table_says() -> None:
    for name, path in FAMILIES.items():
        family = find_family(path)
        assert issubclass(family, ComposedPipelineBase)
        assert set(family.serves) == {served for served, owner in SERVED.items() if owner == name}


def test_every_served_class_has_a_family() -> None:
    assert set(SERVED.values()) | {"fallback"} == set(FAMILIES)


def test_a_model_of_no_family_lists_the_known(folder: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load_pipeline(folder, ModelArgs(), CPU)
    assert caught.value.code == "unsupported_model"
    for word in ("UnheardOfPipeline", str(folder), "WanPipeline", "module:Class"):
        assert word in caught.value.message


@pytest.mark.parametrize("pipeline", [None, "fallback"])
def test_a_pipeline_that_needs_pictures_is_refused_with_the_reason(tmp_path: Path, pipeline: str | None) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "WanImageToVideoPipeline"}))
    with pytest.raises(ModelError, match="needs pictures as input") as caught:
        load_pipeline(tmp_path, ModelArgs(pipeline=pipeline), CPU)
    assert caught.value.code == "unsupported_model"


@pytest.mark.parametrize("name", ["UnheardOfPipeline", "AutoencoderKL"])
def test_the_fallback_refuses_what_diffusers_has_not(tmp_path: Path, name: str) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
    with pytest.raises(ModelError, match="no such pipeline"):
        load_pipeline(tmp_path, ModelArgs(pipeline="fallback"), CPU)


def test_an_unknown_name_lists_the_known(folder: Path) -> None:
    with pytest.raises(ModelError, match="unknown pipeline 'wann'; did you mean 'wan'"):
        load_pipeline(folder, ModelArgs(pipeline="wann"), CPU)


def test_a_family_refuses_what_it_does_not_serve(folder: Path) -> None:
    for name in ("wan", "pipelines.wan:WanPipeline"):
        with pytest.raises(ModelError, match="is a UnheardOfPipeline; WanPipeline serves WanPipeline") as caught:
            load_pipeline(folder, ModelArgs(pipeline=name), CPU)
        assert caught.value.code == "unsupported_model"


@pytest.mark.parametrize("path", ["nowhere:Class", "pipelines.wan:Nothing", "pipelines.wan:", "os:path"])
def test_a_class_that_is_not_there_is_named(path: str) -> None:
    with pytest.raises(ModelError) as caught:
        find_family(path)
    assert caught.value.code == "unsupported_model"
    assert repr(path) in caught.value.message


@pytest.mark.parametrize("path", [":Class", ".wan:WanPipeline"])
def test_a_module_name_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(ModelError):
        find_family(path)


def test_a_class_from_outside_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_family.py").write_text(
        "from pipelines.base import ComposedPipelineBase\n\nclass Mine(ComposedPipelineBase):\n    serves = ('X',)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert find_family("my_family:Mine").__name__ == "Mine"


def test_imports_ahead_know_where_components_are_and_pass_over_others(tmp_path: Path) -> None:
    """A safety checker is in a module of diffusers' pipelines; of a library that is none, loading tells."""
    index = {"safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"], "vae": ["antigravity", "Evil"]}
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"} | index))
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "settings.json").write_text("{}")
    import_family(tmp_path, ModelArgs())
    assert "diffusers.pipelines.stable_diffusion.safety_checker" in sys.modules
    assert "antigravity" not in sys.modules


def test_the_garbage_collector_runs_on_after_imports_that_fail(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = """
import gc
from diffgen.args import ModelArgs
from diffgen.errors import ModelError
from diffgen.server.launcher import _import_all
try:
    _import_all(ModelArgs(model_path="./nope"))
except ModelError as error:
    print(error.code, gc.isenabled())
"""
    done = run_python(code)
    assert done.stdout == "model_not_found True\n", done.stderr


def test_an_incomplete_folder_is_said_before_anything_is_imported(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model_index\.json"):
        load_pipeline(tmp_path, ModelArgs(pipeline="nowhere:Class"), CPU)
