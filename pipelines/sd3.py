"""Stable Diffusion 3 and 3.5 text-to-image (diffusers' ``StableDiffusion3Pipeline``)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch

from diffgen.distributed.tensor import Style, TensorPlan
from diffgen.loading.index import ModelIndex
from diffgen.params import ModelSpec
from diffgen.request import Req
from pipelines.images import ImagePipelineBase
from stages.base import PipelineStage
from stages.decode import DecodingStage
from stages.denoise import DenoisingStage
from stages.latents import LatentPreparationStage
from stages.schedulers import flow_names, make_flow_scheduler, set_timesteps_by_tokens
from stages.text import TextEncodingStage
from stages.timesteps import TimestepStage

_BLOCK = "transformer_blocks.*"
# The second attention is that of the first layers of 3.5 medium.
_ATTENTIONS = (f"{_BLOCK}.attn", f"{_BLOCK}.attn2")
_COLUMNS = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
_FEEDS = (f"{_BLOCK}.ff", f"{_BLOCK}.ff_context")
_COLWISE = [f"{each}.{name}" for each in _ATTENTIONS for name in _COLUMNS] + [f"{each}.net.0.proj" for each in _FEEDS]
_ROWWISE = [f"{each}.{name}" for each in _ATTENTIONS for name in ("to_out.0", "to_add_out")]
_ROWWISE += [f"{each}.net.2" for each in _FEEDS]
_STYLES: dict[str, Style] = {**dict.fromkeys(_COLWISE, "colwise"), **dict.fromkeys(_ROWWISE, "rowwise")}


class StableDiffusion3Pipeline(ImagePipelineBase):
    """Two CLIP encoders and T5, which may be absent, a DiT with joint attention, a VAE of 16 channels.

    Guidance that skips layers is left out.
    """

    serves: ClassVar[tuple[str, ...]] = ("StableDiffusion3Pipeline",)
    usually_guided: ClassVar[bool] = True
    tensor_plans: ClassVar[dict[str, TensorPlan]] = {
        "transformer": TensorPlan(_STYLES, heads=dict.fromkeys(_ATTENTIONS, ("heads",)))
    }

    def make_stages(self) -> Sequence[PipelineStage]:
        stages = (TextEncodingStage, TimestepStage, LatentPreparationStage, DenoisingStage, DecodingStage)
        return [stage(self) for stage in stages]

    def make_spec(self, index: ModelIndex, name: str) -> ModelSpec:
        pipe = self.pipe
        side = pipe.transformer.config.sample_size * pipe.vae_scale_factor
        family = {
            "width": side,
            "height": side,
            "num_inference_steps": 28,
            "guidance_scale": 7.0,
            "max_sequence_length": 256,
        }
        encoders = (pipe.text_encoder, pipe.text_encoder_2)
        # A shift that depends on the picture's size leaves no other.
        shift = () if pipe.scheduler.config.get("use_dynamic_shifting") else ("flow_shift",)
        return ModelSpec(
            name=name,
            family="stable-diffusion-3",
            defaults=self.defaults(index, family),
            size_multiple=pipe.vae_scale_factor * pipe.patch_size,
            frame_stride=0,
            takes=("max_sequence_length", "scheduler", "clip_skip", *shift),
            schedulers=flow_names(),
            longest_text=512,
            # The last layer is left out already.
            most_clip_skip=min(encoder.config.num_hidden_layers for encoder in encoders) - 1,
        )

    def encode_text(self, req: Req) -> tuple[tuple[dict[str, torch.Tensor], ...], tuple[str, ...]]:
        params, pipe = req.params, self.pipe
        states, negative_states, pooled, negative_pooled = pipe.encode_prompt(
            params.prompt,
            None,
            None,
            device=self.device,
            do_classifier_free_guidance=self.is_guided(req),
            negative_prompt=params.negative_prompt,
            clip_skip=params.clip_skip,
            max_sequence_length=params.max_sequence_length,
        )
        dtype = pipe.transformer.dtype
        branches = tuple(
            {"encoder_hidden_states": text.to(dtype), "pooled_projections": pool.to(dtype)}
            for text, pool in ((states, pooled), (negative_states, negative_pooled))
            if text is not None
        )
        texts = {"prompt": params.prompt}
        if self.is_guided(req):
            texts["negative_prompt"] = params.negative_prompt or ""
        readers = [(pipe.tokenizer, pipe.tokenizer_max_length, "the CLIP encoder")]
        if pipe.text_encoder_3 is not None:
            readers.append((pipe.tokenizer_3, params.max_sequence_length, "the T5 encoder"))
        warnings = [self.cut_warnings(reader, texts, length, encoder=name) for reader, length, name in readers]
        return branches, tuple(each for found in warnings for each in found)

    def make_scheduler(self, req: Req) -> Any:
        return make_flow_scheduler(self.pipe.scheduler, req.params.scheduler, req.params.flow_shift)

    def set_timesteps(self, scheduler: Any, req: Req) -> None:
        if not scheduler.config.get("use_dynamic_shifting"):
            super().set_timesteps(scheduler, req)
            return
        assert req.params.width is not None
        assert req.params.height is not None
        tokens = req.params.width * req.params.height // self.spec.size_multiple**2
        steps = req.params.num_inference_steps
        set_timesteps_by_tokens(scheduler, steps, tokens, self.device, even=False, max_shift=1.16)

    def denoise(
        self, latents: torch.Tensor, timestep: torch.Tensor, branch: dict[str, torch.Tensor], key: Hashable
    ) -> torch.Tensor:
        model = self.pipe.transformer
        prediction: torch.Tensor = model(latents.to(model.dtype), timestep=timestep, return_dict=False, **branch)[0]
        return prediction

    def decode_unit(self, req: Req) -> tuple[torch.Tensor, Any]:
        vae = self.pipe.vae
        latents = self.unit_latents(req) / vae.config.scaling_factor + vae.config.shift_factor
        return vae.decode(latents.to(vae.dtype), return_dict=False)[0][:, :, None], None
