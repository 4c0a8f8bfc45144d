"""Any diffusers pipeline that makes pictures or clips from text, through its own ``__call__``.

It can be followed and cancelled by the step; but a request shares no forward, and has the pipeline's own scheduler.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Sequence
from typing import Any, ClassVar

import diffusers
import numpy as np
import torch

from diffgen.args import ModelArgs
from diffgen.distributed.dims import Abilities
from diffgen.distributed.layout import Layout
from diffgen.errors import GenerationError, InvalidRequest, ModelError
from diffgen.loading.index import ModelIndex
from diffgen.media.pixels import unit_to_uint8
from diffgen.params import ModelSpec
from diffgen.request import Req, Update
from pipelines.base import ComposedPipelineBase
from pipelines.notices import noticed
from pipelines.signature import FPS, FRAMES, Signature, find_pipeline, reason_against
from stages.base import PipelineStage
from stages.stepwise import Pause, StepwiseDenoisingStage, StepwiseFinishStage

# Parameters that diffusers' pipelines call as we do.
_SAME = ("width", "height", "num_inference_steps", "guidance_scale", "true_cfg_scale", "max_sequence_length")
_UNSAFE = "nsfw_content_detected"
_OPTIONAL = ("true_cfg_scale", "max_sequence_length", "clip_skip")


class FallbackPipeline(ComposedPipelineBase):
    """What can be asked of it, the signature of the pipeline's call says."""

    #: Whatever no other family serves and diffusers can call with a text.
    serves: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def abilities(cls, index: ModelIndex) -> Abilities:
        """Only its decode can be shared out."""
        reason = "it runs through a call of diffusers' own, whole"
        return Abilities(tensor=reason, sequence=reason, rows=reason)

    @classmethod
    def load(
        cls, index: ModelIndex, model: ModelArgs, device: torch.device, layout: Layout | None = None
    ) -> ComposedPipelineBase:
        kind = find_pipeline(index.pipeline_class)
        reason = "diffusers has no such pipeline" if kind is None else reason_against(kind)
        if reason is not None:
            message = f"{index.folder} is a {index.pipeline_class}, which cannot be served: {reason}"
            raise ModelError(message, code="unsupported_model")
        return cls(index, model, device, layout)

    def make_stages(self) -> Sequence[PipelineStage]:
        return [StepwiseDenoisingStage(self), StepwiseFinishStage(self)]

    def make_spec(self, index: ModelIndex, name: str) -> ModelSpec:
        self.pipe.set_progress_bar_config(disable=True)
        self.signature = signature = Signature(self.pipe)
        own = {each: signature.default(each) for each in (*_SAME, "clip_skip")} | signature.sizes()
        defaults = self.defaults(index, {key: value for key, value in own.items() if value is not None})
        unknown = [each for each in ("width", "height", "num_frames") if each not in defaults]
        if unknown:
            remedy = f'give them in {index.folder / "diffgen.json"}: {{"defaults": {{"{unknown[0]}": ...}}}}'
            raise ModelError(f"{index.pipeline_class} has no default of {', '.join(unknown)}; {remedy}")
        takes = [each for each in _OPTIONAL if each in signature.takes]
        guidance = signature.named(("true_cfg_scale", "guidance_scale") if "negative_prompt" in signature.takes else ())
        if guidance != "guidance_scale" and "guidance_scale" in signature.takes:
            takes.append("guidance_scale")
        return ModelSpec(
            name=name,
            family="fallback",
            defaults=defaults,
            size_multiple=signature.size_multiple(defaults["width"], defaults["height"]),
            frame_stride=signature.frame_stride(defaults["num_frames"]),
            takes=tuple(takes),
            guidance=guidance,
            guidance_needs_negative=guidance == "true_cfg_scale",
        )

    def steps(self, req: Req) -> int:
        assert req.params.num_inference_steps is not None
        return req.outputs * self.signature.steps(req.params.num_inference_steps)

    def call(self, req: Req, pause: Pause) -> tuple[list[dict[str, Any]], list[str]]:
        """The fields of the pipeline's output, of a call for each output of the request; and what diffusers warned of.

        Not of one call for all: some pipelines pass over the count, or refuse it with a negative prompt.
        """

        def on_step_end(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
            pause(values.get("latents"))
            return {}

        callbacks: dict[str, Any] = dict.fromkeys(self.signature.callbacks, on_step_end)
        if not callbacks:  # the older kind
            callbacks = {"callback": lambda step, timestep, latents: pause(latents), "callback_steps": 1}
        arguments, made = self._arguments(req) | callbacks, []
        with noticed() as notices:
            for seed in req.seeds:
                generator = torch.Generator("cpu").manual_seed(seed)
                try:
                    made.append(dict(_own(self.pipe, {})(**arguments, generator=generator)))
                except ValueError as error:
                    if traceback.extract_tb(error.__traceback__)[-1].name != "check_inputs":
                        raise
                    raise InvalidRequest(f"{type(self.pipe).__name__} refuses the request: {error}") from error
        return made, list(notices)

    def _arguments(self, req: Req) -> dict[str, Any]:
        params, signature = req.params, self.signature
        names: dict[str, str | None] = {each: each for each in (*_SAME, "clip_skip", "prompt", "negative_prompt")}
        names["num_frames"] = signature.named(FRAMES)
        if params.num_frames != 1:
            names["fps"] = signature.named(FPS)
        given = {theirs: getattr(params, ours) for ours, theirs in names.items() if theirs in signature.takes}
        arguments = {theirs: value for theirs, value in given.items() if theirs is not None and value is not None}
        if "use_resolution_binning" in signature.takes:
            arguments["use_resolution_binning"] = False  # it would draw in another size, and scale
        return {**arguments, "output_type": "latent" if params.output_type == "latent" else "np"}

    def outputs(self, req: Req, called: tuple[list[dict[str, Any]], list[str]]) -> Update:
        (made, notices), name = called, type(self.pipe).__name__
        warnings = [*req.warnings, *(f"{name}: {notice}" for notice in notices)]
        main = next((each for each in ("frames", "images") if made[0].get(each) is not None), None)
        if main is None:
            raise GenerationError(f"{name} made no images and no frames, but {', '.join(made[0])}")
        unsafe = [seed for seed, each in zip(req.seeds, made, strict=True) if any(each.get(_UNSAFE) or [])]
        if unsafe:
            warnings.append(f"{name} found the outputs of seeds {unsafe} unsafe; they are black")
        others = [key for key, value in made[0].items() if value is not None and key not in (main, _UNSAFE)]
        if others:
            warnings.append(f"{name} made {', '.join(others)} too, which is left out")
        if req.params.output_type == "latent":
            return Update(latents=torch.cat([each[main] for each in made]), warnings=tuple(warnings))
        pixels = torch.from_numpy(np.concatenate([np.asarray(each[main], dtype=np.float32) for each in made]))
        pixels = pixels if pixels.ndim == 5 else pixels[:, None]
        asked = (req.outputs, req.params.num_frames, req.params.height, req.params.width, 3)
        if pixels.shape != asked:
            shapes = [f"{n} x {frames} frames of {w} x {h}" for n, frames, h, w, _ in (asked, pixels.shape)]
            warnings.append(f"asked for {shapes[0]} pixels, {name} made {shapes[1]}")
        return Update(frames=(unit_to_uint8(pixels),), warnings=tuple(warnings))


def _own(pipe: Any, known: dict[int, Any]) -> Any:
    """A copy for one request, since a call leaves marks on its pipeline and scheduler; the models are shared."""
    own = copy.copy(pipe)
    for name, value in vars(pipe).items():
        if isinstance(value, diffusers.SchedulerMixin):
            setattr(own, name, known.setdefault(id(value), copy.deepcopy(value)))
        elif isinstance(value, diffusers.DiffusionPipeline):
            setattr(own, name, _own(value, known))
    return own
