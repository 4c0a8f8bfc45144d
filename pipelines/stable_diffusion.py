"""Stable Diffusion 1.x and 2.x text-to-image (diffusers' ``StableDiffusionPipeline``)."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch

from diffgen.args import ModelArgs
from diffgen.distributed.layout import Layout
from diffgen.errors import ModelError
from diffgen.loading.index import ModelIndex
from diffgen.params import ModelSpec
from diffgen.request import Req
from pipelines.images import ImagePipelineBase
from stages.base import PipelineStage
from stages.decode import DecodingStage
from stages.denoise import DenoisingStage
from stages.latents import LatentPreparationStage
from stages.safety import SafetyStage
from stages.schedulers import make_noise_scheduler, noise_names
from stages.text import TextEncodingStage
from stages.timesteps import TimestepStage


class StableDiffusionPipeline(ImagePipelineBase):
    """CLIP text, a UNet that predicts noise or velocity (as the folder's scheduler says), an image VAE.

    Shapes: n images, latents (n, C, height / 8, width / 8).
    """

    serves: ClassVar[tuple[str, ...]] = ("StableDiffusionPipeline",)
    family: ClassVar[str] = "stable-diffusion"
    usually_guided: ClassVar[bool] = True
    default_guidance: ClassVar[float] = 7.5

    def __init__(self, index: ModelIndex, model: ModelArgs, device: torch.device, layout: Layout | None = None) -> None:
        super().__init__(index, model, device, layout)
        encoder = self.pipe.text_encoder
        if encoder is not None and not hasattr(encoder, "text_model"):
            # encode_prompt looks for the last norm where transformers 4 had it; past nn.Module, which would recurse.
            vars(encoder)["text_model"] = encoder

    def make_stages(self) -> Sequence[PipelineStage]:
        stages: list[PipelineStage] = [
            TextEncodingStage(self),
            TimestepStage(self),
            LatentPreparationStage(self),
            DenoisingStage(self),
            DecodingStage(self),
        ]
        # Loaded only if asked for.
        return stages if getattr(self.pipe, "safety_checker", None) is None else [*stages, SafetyStage(self)]

    def make_spec(self, index: ModelIndex, name: str) -> ModelSpec:
        config = self.pipe.unet.config
        if config.time_cond_proj_dim is not None:
            reason = "its UNet takes guidance as an input (time_cond_proj_dim), which this family does not give it"
            raise ModelError(f"cannot serve {index.folder}: {reason}", code="unsupported_model")
        size = (config.sample_size,) * 2 if isinstance(config.sample_size, int) else config.sample_size
        family = {
            "width": size[1] * self.pipe.vae_scale_factor,
            "height": size[0] * self.pipe.vae_scale_factor,
            "num_inference_steps": 50,
            "guidance_scale": self.default_guidance,
        }
        return ModelSpec(
            name=name,
            family=self.family,
            defaults=self.defaults(index, family),
            # diffusers checks 8 whatever the VAE.
            size_multiple=max(8, self.pipe.vae_scale_factor),
            frame_stride=0,
            takes=("scheduler", "clip_skip"),
            schedulers=noise_names(self.pipe.scheduler),
            most_clip_skip=self.most_clip_skip,
        )

    @property
    def most_clip_skip(self) -> int:
        """Hidden states are those before the first layer and after each."""
        layers: int = self.pipe.text_encoder.config.num_hidden_layers
        return layers

    def encode_text(self, req: Req) -> tuple[tuple[dict[str, torch.Tensor], ...], tuple[str, ...]]:
        params = req.params
        embeds = self.pipe.encode_prompt(
            params.prompt, self.device, 1, self.is_guided(req), params.negative_prompt, clip_skip=params.clip_skip
        )
        branches = tuple({"encoder_hidden_states": each} for each in embeds if each is not None)
        tokenizer = self.pipe.tokenizer
        return branches, self.cut_warnings(tokenizer, self.encoded_texts(req), tokenizer.model_max_length)

    def encoded_texts(self, req: Req) -> dict[str, str]:
        texts = {"prompt": req.params.prompt}
        return texts | ({"negative_prompt": req.params.negative_prompt or ""} if self.is_guided(req) else {})

    def make_scheduler(self, req: Req) -> Any:
        return make_noise_scheduler(self.pipe.scheduler, req.params.scheduler)

    def prepare_latents(self, req: Req, generators: list[torch.Generator]) -> torch.Tensor:
        # The first sigma depends on the scheduler and its steps.
        pipe = copy.copy(self.pipe)
        pipe.scheduler = req.scheduler
        channels, size = pipe.unet.config.in_channels, (req.params.height, req.params.width)
        latents: torch.Tensor = pipe.prepare_latents(
            req.outputs, channels, *size, torch.float32, self.device, generators
        )
        return latents

    def denoise(
        self, latents: torch.Tensor, timestep: torch.Tensor, branch: dict[str, torch.Tensor], key: Hashable
    ) -> torch.Tensor:
        model = self.pipe.unet
        prediction: torch.Tensor = model(latents.to(model.dtype), timestep, return_dict=False, **branch)[0]
        return prediction

    def decode_unit(self, req: Req) -> tuple[torch.Tensor, Any]:
        vae = self.pipe.vae
        latents = self.unscale(self.unit_latents(req)).to(vae.dtype)
        return vae.decode(latents, return_dict=False)[0][:, :, None], None

    def unscale(self, latents: torch.Tensor) -> torch.Tensor:
        """The denoiser's latents as the VAE's."""
        scaled: torch.Tensor = latents / self.pipe.vae.config.scaling_factor
        return scaled

    def flag_pictures(self, pictures: torch.Tensor) -> Sequence[bool]:
        images = pictures.float().div(255).cpu().numpy()
        flags: Sequence[bool] = self.pipe.run_safety_checker(images, self.device, self.pipe.text_encoder.dtype)[1]
        return flags
