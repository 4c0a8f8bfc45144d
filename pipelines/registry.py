"""Which family serves a model."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from pathlib import Path

import torch

from diffgen.args import ModelArgs
from diffgen.distributed.dims import Abilities
from diffgen.distributed.layout import Layout
from diffgen.errors import ModelError
from diffgen.fields import nearest_name
from diffgen.loading.components import component_class
from diffgen.loading.index import ModelIndex, read_index
from pipelines.base import ComposedPipelineBase
from pipelines.signature import find_pipeline

Arrange = Callable[[Abilities, str], Layout]

# name -> module:Class, imported when used.
FAMILIES = {
    "fallback": "pipelines.fallback:FallbackPipeline",
    "flux": "pipelines.flux:FluxPipeline",
    "qwen-image": "pipelines.qwen_image:QwenImagePipeline",
    "hunyuan-video": "pipelines.hunyuan_video:HunyuanVideoPipeline",
    "sana": "pipelines.sana:SanaPipeline",
    "wan": "pipelines.wan:WanPipeline",
    "stable-diffusion": "pipelines.stable_diffusion:StableDiffusionPipeline",
    "stable-diffusion-xl": "pipelines.sdxl:StableDiffusionXLPipeline",
    "stable-diffusion-3": "pipelines.sd3:StableDiffusion3Pipeline",
}
# ``_class_name`` of model_index.json -> name.
SERVED = {
    "FluxPipeline": "flux",
    "QwenImagePipeline": "qwen-image",
    "HunyuanVideoPipeline": "hunyuan-video",
    "SanaPipeline": "sana",
    "WanPipeline": "wan",
    "StableDiffusionPipeline": "stable-diffusion",
    "StableDiffusionXLPipeline": "stable-diffusion-xl",
    "StableDiffusion3Pipeline": "stable-diffusion-3",
}


def find_family(path: str) -> type[ComposedPipelineBase]:
    """The class of ``module:Class``, which may come from outside. Raises :class:`ModelError`."""
    module_name, _, class_name = path.partition(":")
    try:
        family = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ModelError(f"cannot import the pipeline {path!r}: {error}", code="unsupported_model") from error
    if not (isinstance(family, type) and issubclass(family, ComposedPipelineBase)):
        raise ModelError(f"{path!r} is not a ComposedPipelineBase", code="unsupported_model")
    return family


def load_pipeline(
    folder: Path, model: ModelArgs, device: torch.device, arrange: Arrange | None = None
) -> ComposedPipelineBase:
    """The pipeline of a model's folder, loaded; on the device "meta", without weights.

    ``arrange`` gives the layout once it is known by what the model can be split; one rank without it.

    Raises :class:`ModelError` naming what is missing or known.
    """
    index = read_index(folder, model.variant, model.safety_checker, weights=device.type != "meta")
    family = _family_of(index, model)
    layout = None if arrange is None else arrange(family.abilities(index), index.pipeline_class)
    return family.load(index, model, device, layout)


def import_family(folder: Path, model: ModelArgs) -> None:
    """Import what :func:`load_pipeline` is going to need. Raises whatever that would."""
    index = read_index(folder, model.variant, model.safety_checker)
    _family_of(index, model)
    for kind in filter(None, index.components.values()):
        with contextlib.suppress(AttributeError):  # loading says what is not there
            component_class(*kind)


def _family_of(index: ModelIndex, model: ModelArgs) -> type[ComposedPipelineBase]:
    if model.pipeline is None:
        name = SERVED.get(index.pipeline_class)
        if name is None and find_pipeline(index.pipeline_class) is not None:
            name = "fallback"
        if name is None:
            known = ", ".join(sorted(SERVED))
            remedy = f"known: {known}; or give pipeline=module:Class"
            raise ModelError(
                f"no family serves {index.pipeline_class} ({index.folder}); {remedy}", code="unsupported_model"
            )
        path = FAMILIES[name]
    elif ":" in model.pipeline:
        path = model.pipeline
    elif model.pipeline in FAMILIES:
        path = FAMILIES[model.pipeline]
    else:
        remedy = f"{nearest_name(model.pipeline, FAMILIES)}, or give module:Class"
        raise ModelError(f"unknown pipeline {model.pipeline!r}; {remedy}", code="unsupported_model")
    return find_family(path)
