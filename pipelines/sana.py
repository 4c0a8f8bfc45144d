"""Sana text-to-image (diffusers' ``SanaPipeline``)."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import diffusers
import torch

from diffgen.loading.index import ModelIndex
from diffgen.params import ModelSpec
from diffgen.request import Req
from pipelines.images import ImagePipelineBase
from stages.base import PipelineStage
from stages.decode import DecodingStage
from stages.denoise import DenoisingStage
from stages.latents import LatentPreparationStage
from stages.schedulers import flow_names, make_flow_scheduler
from stages.text import TextEncodingStage
from stages.timesteps import TimestepStage

# Lines that stand before every prompt, but before no negative one.
_INSTRUCTION = inspect.signature(diffusers.SanaPipeline.__call__).parameters["complex_human_instruction"].default


class SanaPipeline(ImagePipelineBase):
    """Gemma 2 with an instruction as text encoder, a DiT with linear attention, a VAE that compresses space by 32."""

    serves: ClassVar[tuple[str, ...]] = ("SanaPipeline",)
    usually_guided: ClassVar[bool] = True

    def make_stages(self) -> Sequence[PipelineStage]:
        stages = (TextEncodingStage, TimestepStage, LatentPreparationStage, DenoisingStage, DecodingStage)
        return [stage(self) for stage in stages]

    def make_spec(self, index: ModelIndex, name: str) -> ModelSpec:
        config, scale = self.pipe.transformer.config, self.pipe.vae_scale_factor
        family = {
            "width": config.sample_size * scale,
            "height": config.sample_size * scale,
            "num_inference_steps": 20,
            "guidance_scale": 4.5,
            "max_sequence_length": 300,
        }
        return ModelSpec(
            name=name,
            family="sana",
            defaults=self.defaults(index, family),
            # diffusers checks 32 whatever the VAE.
            size_multiple=max(32, scale * config.patch_size),
            frame_stride=0,
            takes=("max_sequence_length", "scheduler", "flow_shift"),
            schedulers=flow_names(),
            longest_text=300,
        )

    def encode_text(self, req: Req) -> tuple[tuple[dict[str, torch.Tensor], ...], tuple[str, ...]]:
        params = req.params
        prompt, prompt_mask, negative, negative_mask = self.pipe.encode_prompt(
            params.prompt,
            self.is_guided(req),
            params.negative_prompt or "",
            device=self.device,
            max_sequence_length=params.max_sequence_length,
            complex_human_instruction=_INSTRUCTION,
        )
        dtype = self.pipe.transformer.dtype
        branches = tuple(
            {"encoder_hidden_states": text.to(dtype), "encoder_attention_mask": mask}
            for text, mask in ((prompt, prompt_mask), (negative, negative_mask))
            if text is not None
        )
        return branches, self._warnings(req)

    def _warnings(self, req: Req) -> tuple[str, ...]:
        params, tokenizer, length = req.params, self.pipe.tokenizer, req.params.max_sequence_length
        head = "\n".join(_INSTRUCTION)
        # Of the tokens that are read two are no prompt's.
        start = len(tokenizer.encode(head)) - 2
        texts = {"prompt": params.prompt.lower().strip()}
        gemma: dict[str, Any] = {"encoder": "Gemma", "end_token": False}
        warnings = self.cut_warnings(tokenizer, texts, length, template=head + "{}", start=start, **gemma)
        if self.is_guided(req):
            texts = {"negative_prompt": (params.negative_prompt or "").lower().strip()}
            warnings += self.cut_warnings(tokenizer, texts, length, **gemma)
        return warnings

    def make_scheduler(self, req: Req) -> Any:
        return make_flow_scheduler(self.pipe.scheduler, req.params.scheduler, req.params.flow_shift)

    def denoise(
        self, latents: torch.Tensor, timestep: torch.Tensor, branch: dict[str, torch.Tensor], key: Hashable
    ) -> torch.Tensor:
        model = self.pipe.transformer
        timestep = timestep * model.config.timestep_scale
        prediction: torch.Tensor = model(latents.to(model.dtype), timestep=timestep, return_dict=False, **branch)[0]
        return prediction[:, : latents.shape[1]].float()

    def decode_unit(self, req: Req) -> tuple[torch.Tensor, Any]:
        vae = self.pipe.vae
        latents = self.unit_latents(req).to(vae.dtype) / vae.config.scaling_factor
        return vae.decode(latents, return_dict=False)[0][:, :, None], None
