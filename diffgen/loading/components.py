"""The components of a model, loaded through its own diffusers pipeline class."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch

from diffgen.args import ModelArgs
from diffgen.errors import ModelError
from diffgen.loading.device import default_dtype
from diffgen.loading.index import ModelIndex

logger = logging.getLogger(__name__)


def load_components(index: ModelIndex, model: ModelArgs, device: torch.device, float32: frozenset[str]) -> Any:
    """The diffusers pipeline of a checked folder, in evaluation mode on ``device``: safetensors only, no network.

    Raises :class:`ModelError` with the reason that diffusers or transformers give.
    """
    import diffusers

    dtype = default_dtype(device) if model.dtype is None else getattr(torch, model.dtype)
    dtypes = {"default": dtype, **dict.fromkeys(float32, torch.float32)}
    kind = getattr(diffusers, index.pipeline_class, None)
    if kind is None:
        version = diffusers.__version__
        raise ModelError(f"diffusers {version} has no {index.pipeline_class}", code="unsupported_model")
    _be_quiet()
    absent: dict[str, Any] = dict.fromkeys(index.left_out)
    if index.left_out and "requires_safety_checker" in inspect.signature(kind.__init__).parameters:
        absent["requires_safety_checker"] = False
    try:
        pipe = kind.from_pretrained(
            index.folder,
            dtype=dtypes,
            variant=model.variant,
            use_safetensors=True,
            local_files_only=True,
            **absent,
        )
        return pipe.to(device)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, ImportError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(f"cannot load {index.folder}: {reason}", code="model_incomplete") from error


def _be_quiet() -> None:
    # Their progress bars would be printed by every rank.
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
