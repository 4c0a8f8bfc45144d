"""Qwen-Image text-to-image (diffusers' ``QwenImagePipeline``)."""

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


class QwenImagePipeline(PackedPipelineBase):
    """Qwen2.5-VL's language model as text encoder, a DiT over patches of 2 x 2 latents, an image VAE made of Wan's.

    Latents are packed: (n, tokens, 4 x channels), a token a patch. Texts are encoded one by one, each at its own
    length, so there is no padding to mask, and only texts of equal length share a forward.
    """

    serves: ClassVar[tuple[str, ...]] = ("QwenImagePipeline",)

    def make_stages(self) -> Sequence[PipelineStage]:
        return [
            TextEncodingStage(self),
            TimestepStage(self),
            LatentPreparationStage(self),
            DenoisingStage(self),
            DecodingStage(self),
        ]

    def make_spec(self, index: ModelIndex, name: str) -> ModelSpec:
        family = {
            "width": 1024,
            "height": 1024,
            "num_frames": 1,
            "num_inference_steps": 50,
            "true_cfg_scale": 4.0,
            "max_sequence_length": 512,
        }
        return ModelSpec(
            name=name,
            family="qwen-image",
            defaults=self.defaults(index, family),
            size_multiple=self.token_pixels,
            frame_stride=0,
            takes=("max_sequence_length", "true_cfg_scale"),
            guidance="true_cfg_scale",
            guidance_needs_negative=True,
            least_steps=least_steps(self.pipe.scheduler),
            longest_text=self.pipe.tokenizer_max_length,
        )

    def encode_text(self, req: Req) -> tuple[tuple[dict[str, torch.Tensor], ...], tuple[str, ...]]:
        params = req.params
        pipe, length = self.pipe, params.max_sequence_length
        texts = {"prompt": params.prompt}
        if self.is_guided(req):
            texts["negative_prompt"] = params.negative_prompt or ""
        branches = []
        for text in texts.values():
            embeds, mask = pipe.encode_prompt(text, device=self.device, max_sequence_length=length)
            assert mask is None, "one text has no padding"
            branches.append({"encoder_hidden_states": embeds.to(pipe.transformer.dtype)})
        return tuple(branches), self.cut_warnings(
            pipe.tokenizer,
            texts,
            length,
            template=pipe.prompt_template_encode,
            start=pipe.prompt_template_encode_start_idx,
            end_token=False,
        )

    def set_timesteps(self, scheduler: Any, req: Req) -> None:
        rows, columns = self.grid(req)
        set_timesteps_by_tokens(scheduler, req.params.num_inference_steps, rows * columns, self.device)

    def denoise(
        self, latents: torch.Tensor, timestep: torch.Tensor, branch: dict[str, torch.Tensor], key: Hashable
    ) -> torch.Tensor:
        assert isinstance(key, tuple)
        model = self.pipe.transformer
        shapes = [[(1, *key[-1])]] * len(latents)
        prediction: torch.Tensor = model(
            latents.to(model.dtype), timestep=timestep / 1000, img_shapes=shapes, return_dict=False, **branch
        )[0]
        return prediction

    def guide(self, predictions: Sequence[torch.Tensor], req: Req) -> torch.Tensor:
        """Classifier-free guidance that keeps each token's prediction as long as the conditional one."""
        guided = super().guide(predictions, req)
        if len(predictions) == 1:
            return guided
        wanted, has = (torch.norm(each, dim=-1, keepdim=True) for each in (predictions[0], guided))
        rescaled: torch.Tensor = guided * (wanted / has)
        return rescaled

    def decode_unit(self, req: Req) -> tuple[torch.Tensor, Any]:
        vae = self.pipe.vae
        latents = self.unpacked(req).to(vae.dtype)
        mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1).to(latents)
        inverse_std = 1.0 / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1).to(latents)
        pixels: torch.Tensor = vae.decode(latents / inverse_std + mean, return_dict=False)[0]
        return pixels, None
