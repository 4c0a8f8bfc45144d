"""FLUX.1 text-to-image: dev, schnell and models like them (diffusers' ``FluxPipeline``)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch

from diffgen.loading.index import ModelIndex
from diffgen.params import ModelSpec
from diffgen.request import Req
from pipelines.packed import PackedPipelineBase
from stages.base import PipelineStage
from stages.decode import DecodingStage
from stages.denoise import DenoisingStage
from stages.latents import LatentPreparationStage
from stages.schedulers import least_steps, set_timesteps_by_tokens
from stages.text import TextEncodingStage
from stages.timesteps import TimestepStage


class FluxPipeline(PackedPipelineBase):
    """CLIP's pooled text and T5, a DiT over patches of 2 x 2 latents, a VAE of 16 channels.

    Latents are packed: (n, tokens, 4 x channels), a token a patch. Models with guidance embeddings (dev) take
    ``guidance_scale`` as an input, so requests with different ones share a forward; models without (schnell) have none.
    Classifier-free guidance is ``true_cfg_scale`` and needs a negative prompt.
    """

    serves: ClassVar[tuple[str, ...]] = ("FluxPipeline",)

    def make_stages(self) -> Sequence[PipelineStage]:
        return [
            TextEncodingStage(self),
            TimestepStage(self),
            LatentPreparationStage(self),
            DenoisingStage(self),
            DecodingStage(self),
        ]

    def make_spec(self, index: ModelIndex, name: str) -> ModelSpec:
        embedded = self.pipe.transformer.config.guidance_embeds
        family = {"width": 1024, "height": 1024, "num_frames": 1, "true_cfg_scale": 1.0}
        # Models without guidance embeddings are distilled to few steps, and trained on shorter texts.
        if embedded:
            family |= {"num_inference_steps": 28, "guidance_scale": 3.5, "max_sequence_length": 512}
        else:
            family |= {"num_inference_steps": 4, "max_sequence_length": 256}
        return ModelSpec(
            name=name,
            family="flux",
            defaults=self.defaults(index, family),
            size_multiple=self.token_pixels,
            frame_stride=0,
            takes=("max_sequence_length", "true_cfg_scale", *(("guidance_scale",) if embedded else ())),
            guidance="true_cfg_scale",
            guidance_needs_negative=True,
            least_steps=least_steps(self.pipe.scheduler),
            longest_text=512,
        )

    def encode_text(self, req: Req) -> tuple[tuple[dict[str, torch.Tensor], ...], tuple[str, ...]]:
        params = req.params
        pipe, length = self.pipe, params.max_sequence_length
        texts = {"prompt": params.prompt}
        if self.is_guided(req):
            texts["negative_prompt"] = params.negative_prompt or ""
        branches = []
        for text in texts.values():
            embeds, pooled, _ = pipe.encode_prompt(text, device=self.device, max_sequence_length=length)
            dtype = pipe.transformer.dtype
            branch = {"encoder_hidden_states": embeds.to(dtype), "pooled_projections": pooled.to(dtype)}
            if pipe.transformer.config.guidance_embeds:
                branch["guidance"] = torch.tensor([params.guidance_scale], dtype=torch.float32, device=self.device)
            branches.append(branch)
        pooled_length = pipe.tokenizer_max_length
        return tuple(branches), (
            *self.cut_warnings(pipe.tokenizer_2, texts, length, encoder="the T5 encoder"),
            *self.cut_warnings(pipe.tokenizer, texts, pooled_length, encoder="the CLIP encoder"),
        )

    def set_timesteps(self, scheduler: Any, req: Req) -> None:
        rows, columns = self.grid(req)
        even = not scheduler.config.get("use_flow_sigmas", False)
        set_timesteps_by_tokens(scheduler, req.params.num_inference_steps, rows * columns, self.device, even=even)

    def prepare_latents(self, req: Req, generators: list[torch.Generator]) -> torch.Tensor:
        size = (req.params.height, req.params.width)
        latents: torch.Tensor = self.pipe.prepare_latents(
            req.outputs, self.latent_channels, *size, torch.float32, self.device, generators
        )[0]
        return latents

    def denoise(
        self, latents: torch.Tensor, timestep: torch.Tensor, branch: dict[str, torch.Tensor], key: Hashable
    ) -> torch.Tensor:
        assert isinstance(key, tuple)
        model = self.pipe.transformer
        text_ids = torch.zeros(branch["encoder_hidden_states"].shape[1], 3, device=self.device)
        image_ids = self.pipe._prepare_latent_image_ids(len(latents), *key[-1], self.device, torch.float32)
        prediction: torch.Tensor = model(
            latents.to(model.dtype),
            timestep=timestep / 1000,
            txt_ids=text_ids,
            img_ids=image_ids,
            return_dict=False,
            **branch,
        )[0]
        return prediction

    def decode_unit(self, req: Req) -> tuple[torch.Tensor, Any]:
        vae = self.pipe.vae
        latents = self.unpacked(req) / vae.config.scaling_factor + vae.config.shift_factor
        pixels = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
        return pixels[:, :, None], None
