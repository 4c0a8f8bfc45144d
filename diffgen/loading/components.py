"""The components of a model, loaded through its own diffusers pipeline class."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from diffgen.args import ModelArgs
from diffgen.distributed.axis import AxisGroup
from diffgen.distributed.groups import lacks_memory
from diffgen.distributed.tensor import TensorPlan, read_sliced, slice_empty
from diffgen.errors import ModelError, StartFailed
from diffgen.loading.device import default_dtype
from diffgen.loading.index import ModelIndex, refuse_lacking
from diffgen.loading.memory import MORE_MEMORY

logger = logging.getLogger(__name__)


def load_components(
    index: ModelIndex,
    model: ModelArgs,
    device: torch.device,
    float32: frozenset[str],
    plans: Mapping[str, TensorPlan] | None = None,
    tp: AxisGroup | None = None,
) -> Any:
    """The diffusers pipeline of a checked folder, in evaluation mode on ``device``: safetensors only, no network.

    On the device "meta" the models are there without their weights, of which no file is read. Of the components in
    ``plans``, this rank of ``tp`` reads its slices alone.

    Raises :class:`ModelError` with the reason that diffusers or transformers give, and for weights that lack some of a
    model's, in whose place they would put random ones; :class:`StartFailed` where memory runs out.
    """
    import diffusers

    dtype = default_dtype(device) if model.dtype is None else getattr(torch, model.dtype)
    dtypes = {"default": dtype, **dict.fromkeys(float32, torch.float32)}
    kind = getattr(diffusers, index.pipeline_class, None)
    if kind is None:
        version = diffusers.__version__
        raise ModelError(f"diffusers {version} has no {index.pipeline_class}", code="unsupported_model")
    _be_quiet()
    # Some pipelines want to be told of what their folder says is not there.
    absent: dict[str, Any] = {name: None for name, kind in index.components.items() if kind is None}
    absent |= dict.fromkeys(index.left_out)
    if index.left_out and "requires_safety_checker" in inspect.signature(kind.__init__).parameters:
        absent["requires_safety_checker"] = False
    try:
        given = absent | (_empty_models(index, dtypes) if device.type == "meta" else {})
        for name, plan in (plans or {}).items():
            assert tp is not None
            empty = _empty_models(index, dtypes, name)[name]
            if device.type == "meta":
                slice_empty(empty, plan, tp, str(index.folder / name))
            else:
                read_sliced(empty, index.folder / name, model.variant, plan, tp)
            given[name] = empty
        for name, component in _models(index):
            if name not in given:
                folder = index.folder / name
                given[name] = _read_whole(component, folder, dtypes.get(name, dtype), model.variant)
        pipe = kind.from_pretrained(
            index.folder,
            dtype=dtypes,
            use_safetensors=True,
            local_files_only=True,
            **given,
        )
        return pipe.to(device)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, ImportError, AttributeError, MemoryError) as error:
        reason = f"{type(error).__name__}: {error}"
        if lacks_memory(error):
            where = f"out of memory on {device} while loading {index.folder} ({reason})"
            raise StartFailed(f"{where}; {MORE_MEMORY}", code="insufficient_memory") from error
        raise ModelError(f"cannot load {index.folder}: {reason}", code="model_incomplete") from error


def component_class(library: str, name: str) -> Any:
    """The class that model_index.json names so. Raises :class:`AttributeError` where there is none."""
    import diffusers
    import transformers

    # Beside the two libraries, the modules of diffusers' own pipelines hold components.
    modules = {"diffusers": diffusers, "transformers": transformers}
    return getattr(modules.get(library) or getattr(diffusers.pipelines, library), name)


def _models(index: ModelIndex) -> Iterator[tuple[str, Any]]:
    """Name and class of each component that has weights."""
    import diffusers
    import transformers

    for name, kind in index.components.items():
        if kind is not None and name not in index.left_out and (index.folder / name / "config.json").exists():
            try:
                component = component_class(*kind)
            except AttributeError:
                continue  # diffusers says why it is not loaded, such as code in the folder
            if issubclass(component, diffusers.ModelMixin | transformers.PreTrainedModel):
                yield name, component


def _read_whole(component: Any, folder: Path, dtype: torch.dtype, variant: str | None) -> torch.nn.Module:
    model: torch.nn.Module
    model, told = component.from_pretrained(
        folder, dtype=dtype, variant=variant, use_safetensors=True, local_files_only=True, output_loading_info=True
    )
    refuse_lacking(folder, told["missing_keys"])
    return model


def _empty_models(
    index: ModelIndex, dtypes: dict[str, torch.dtype], only: str | None = None
) -> dict[str, torch.nn.Module]:
    """Each component that has weights, from its configuration alone, with parameters on the device "meta"."""
    import diffusers
    from accelerate import init_empty_weights

    found: dict[str, torch.nn.Module] = {}
    for name, component in _models(index):
        folder = index.folder / name
        if only not in (None, name):
            continue
        with init_empty_weights():
            if issubclass(component, diffusers.ModelMixin):
                model = component.from_config(component.load_config(folder))
            else:
                model = component(component.config_class.from_pretrained(folder))
        if hasattr(model, "tie_weights"):
            model.tie_weights()  # each place of a shared weight has become a parameter of its own
        set_dtype(model, dtypes.get(name, dtypes["default"]))
        found[name] = model.eval()
    return found


def set_dtype(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """As ``from_pretrained`` does, which keeps in float32 what the model's class names."""
    names: set[str] = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16 or not hasattr(model, "_keep_in_fp32_modules_strict"):  # transformers' alone has it
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if names & set(name.split(".")) else dtype)


def _be_quiet() -> None:
    import diffusers
    import transformers

    # Every rank would show its own.
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    # It warns of each model that it is given and that its own pipelines define, by printing all of its layers.
    logging.getLogger("diffusers.pipelines.pipeline_loading_utils").setLevel(logging.ERROR)
