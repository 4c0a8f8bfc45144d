"""What a diffusers pipeline tells of itself: by the signature of its ``__call__`` and by its components' settings."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
from diffusers.pipelines.pag.pag_utils import PAGMixin

CALLBACK = "callback_on_step_end"
# Names that one thing has in different pipelines.
FRAMES = ("num_frames", "frames", "video_length")
FPS = ("frame_rate", "fps")

_SIZES = ("width", "height")
_SPATIAL = ("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_compression_ratio", "movq_scale_factor")
_TEMPORAL = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")
_DENOISERS = ("transformer", "unet", "decoder", "prior")
_PICTURES = {"image", "images", "video", "mask_image", "control_image", "cond_image", "control_video"}
_PICTURES |= {"conditioning_frames", "init_image", "input_images", "pose_video", "gligen_images"}
# Signatures give pictures a default of None also where the call refuses it.
_NEEDS_PICTURES = re.compile(
    "Img2Img|Image(To|2)|Video(To|2)|I2V|Inpaint|Control|Edit|Fill|Adapter|Pix2Pix|SuperRes|Upscale|Refiner|GLIGEN"
)


def find_pipeline(name: str) -> type | None:
    """The pipeline class of this name, where diffusers has one."""
    kind = getattr(diffusers, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, diffusers.DiffusionPipeline) else None


def parameters_of(kind: type) -> Mapping[str, inspect.Parameter]:
    """The named parameters of a pipeline class's call."""
    found = list(inspect.signature(kind.__call__).parameters.values())[1:]
    return {each.name: each for each in found if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}


def reason_against(kind: type) -> str | None:
    """Why the calls of a pipeline class cannot be served by text, size, steps and seed alone; None where they can."""
    takes = parameters_of(kind)
    required = [name for name, each in takes.items() if each.default is each.empty and name != "prompt"]
    pictures = [name for name in takes if name in _PICTURES]
    if pictures and (_NEEDS_PICTURES.search(kind.__name__) or set(pictures) & set(required)):
        return f"it needs pictures as input ({', '.join(pictures)}), and a request has none"
    if "prompt" not in takes or required:
        needs = ", ".join(required) or "no text at all"
        return f"its call is not made of a prompt alone: it takes {needs}"
    for name in (*_SIZES, "num_inference_steps", "generator", "output_type"):
        if name not in takes:
            return f"its call takes no {name}"
    if not any(name.endswith(CALLBACK) or name == "callback" for name in takes):
        return "its call tells nothing of its steps, so it could not be cancelled or followed"
    if issubclass(kind, PAGMixin):
        return "its call changes the denoiser while it runs, so that requests could not take turns"
    return None


class Signature:
    """A loaded pipeline's: which parameters it takes, and with which defaults and rules."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.takes = parameters_of(type(pipe))
        self.callbacks = [name for name in self.takes if name.endswith(CALLBACK)]
        denoiser = next((getattr(pipe, name) for name in _DENOISERS if getattr(pipe, name, None) is not None), None)
        self._config: Mapping[str, Any] = getattr(denoiser, "config", {})

    def named(self, names: Sequence[str]) -> str | None:
        """Which of the names the pipeline uses."""
        return next((name for name in names if name in self.takes), None)

    def default(self, name: str) -> Any:
        return self.takes[name].default if name in self.takes else None

    def sizes(self) -> dict[str, Any]:
        """Default width, height, num_frames and fps; None where nothing tells them."""
        found: dict[str, Any] = {}
        scale = self._attribute(_SPATIAL) or 1
        for name in _SIZES:
            side = self._config.get(f"sample_{name}") or getattr(self.pipe, "default_sample_size", None)
            side = side or self._config.get("sample_size")
            found[name] = self.default(name) or (side * scale if isinstance(side, int) else None)
        frames, fps = self.named(FRAMES), self.named(FPS)
        if frames is None:
            return {**found, "num_frames": 1}
        found["num_frames"] = self.default(frames) or self._config.get("sample_frames")
        # 8 as most of them were trained with.
        return {**found, "fps": float((fps and self.default(fps)) or 8)}

    def size_multiple(self, width: int, height: int) -> int:
        scale = self._attribute(_SPATIAL) or 8
        patch = self._config.get("patch_size") or 1
        multiple = int(scale * (patch if isinstance(patch, int) else patch[-1]))
        # Where the pipeline's own default breaks the rule, it is none.
        return int(scale) if width % multiple or height % multiple else multiple

    def frame_stride(self, frames: int) -> int:
        if self.named(FRAMES) is None:
            return 0
        stride = int(self._attribute(_TEMPORAL) or 1)
        return 1 if (frames - 1) % stride else stride

    def steps(self, asked: int) -> int:
        """How often the callbacks of a call are called."""
        total = 0
        for name in self.callbacks:
            prefix = name.removesuffix(CALLBACK)
            steps = self.default(f"{prefix}num_inference_steps") if prefix else asked
            total += _timesteps(getattr(self.pipe, f"{prefix}scheduler", None), steps)
        return total or asked

    def _attribute(self, names: Sequence[str]) -> Any:
        return next((getattr(self.pipe, name) for name in names if hasattr(self.pipe, name)), None)


def _timesteps(scheduler: Any, steps: int) -> int:
    """A multistep or second-order scheduler has more timesteps than steps."""
    own = copy.deepcopy(scheduler)
    try:
        own.set_timesteps(steps)
    except (AttributeError, TypeError, ValueError):
        return steps  # one that needs more to know, such as the number of tokens: none of these has others
    return len(own.timesteps)
