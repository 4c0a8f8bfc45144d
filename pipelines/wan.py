"""Wan 2.1 and 2.2 text-to-video and, with one frame, text-to-image (diffusers' ``WanPipeline``)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from diffusers.pipelines.wan.pipeline_wan import prompt_clean

from diffgen.distributed.tensor import Style, TensorPlan
from diffgen.loading.index import ModelIndex
from diffgen.params import ModelSpec
from diffgen.request import Req
from pipelines.base import ComposedPipelineBase
from stages.base import PipelineStage
from stages.decode import DecodingStage
from stages.denoise import DenoisingStage
from stages.latents import LatentPreparationStage
from stages.schedulers import flow_names, make_flow_scheduler
from stages.text import TextEncodingStage
from stages.timesteps import TimestepStage

_STYLES: dict[str, Style] = {"to_q": "colwise", "to_k": "colwise", "to_v": "colwise", "to_out.0": "rowwise"}
# Queries and keys are normed over all heads together.
_STYLES |= {"norm_q": "norm", "norm_k": "norm"}
_ATTENTIONS = ("blocks.*.attn1", "blocks.*.attn2")
_TENSOR_PLAN = TensorPlan(
    {f"{attention}.{name}": style for attention in _ATTENTIONS for name, style in _STYLES.items()}
    | {"blocks.*.ffn.net.0.proj": "colwise", "blocks.*.ffn.net.2": "rowwise"},
    heads=dict.fromkeys(_ATTENTIONS, ("heads",)),
)


class WanPipeline(ComposedPipelineBase):
    """UMT5 text, a DiT over (frames, height, width) patches, a causal video VAE.

    Wan 2.2 models with two experts switch between them at ``boundary_ratio``; requests on different sides of it do not
    share a forward.
    """

    serves: ClassVar[tuple[str, ...]] = ("WanPipeline",)
    float32_components: ClassVar[frozenset[str]] = frozenset({"vae"})
    usually_guided: ClassVar[bool] = True
    tensor_plans: ClassVar[dict[str, TensorPlan]] = dict.fromkeys(("transformer", "transformer_2"), _TENSOR_PLAN)

    def make_stages(self) -> Sequence[PipelineStage]:
        return [
            TextEncodingStage(self),
            TimestepStage(self),
            LatentPreparationStage(self),
            DenoisingStage(self),
            DecodingStage(self),
        ]

    def make_spec(self, index: ModelIndex, name: str) -> ModelSpec:
        patch = self._any_denoiser.config.patch_size
        family = {
            "width": 832,
            "height": 480,
            "num_frames": 81,
            "fps": 16.0,
            "num_inference_steps": 50,
            "guidance_scale": 5.0,
            "max_sequence_length": 512,
        }
        two_experts = () if self.pipe.config.boundary_ratio is None else ("guidance_scale_2",)
        return ModelSpec(
            name=name,
            family="wan",
            defaults=self.defaults(index, family),
            # diffusers checks 16 whatever the patch.
            size_multiple=max(16, self.pipe.vae_scale_factor_spatial * max(patch[1:])),
            frame_stride=self.pipe.vae_scale_factor_temporal,
            takes=("max_sequence_length", "scheduler", "flow_shift", *two_experts),
            schedulers=flow_names(),
            longest_text=512,
        )

    @property
    def _any_denoiser(self) -> Any:
        return self.pipe.transformer if self.pipe.transformer is not None else self.pipe.transformer_2

    def encode_text(self, req: Req) -> tuple[tuple[dict[str, torch.Tensor], ...], tuple[str, ...]]:
        params = req.params
        length = params.max_sequence_length
        prompt, negative = self.pipe.encode_prompt(
            params.prompt,
            params.negative_prompt,
            do_classifier_free_guidance=self.is_guided(req),
            max_sequence_length=length,
            device=self.device,
        )
        embeds = [prompt] if negative is None else [prompt, negative]
        dtype = self._any_denoiser.dtype
        branches = tuple({"encoder_hidden_states": each.to(dtype)} for each in embeds)
        texts = {"prompt": params.prompt, "negative_prompt": params.negative_prompt or ""}
        encoded = {name: prompt_clean(text) for name, text in list(texts.items())[: len(embeds)]}
        return branches, self.cut_warnings(self.pipe.tokenizer, encoded, length)

    def make_scheduler(self, req: Req) -> Any:
        return make_flow_scheduler(self.pipe.scheduler, req.params.scheduler, req.params.flow_shift)

    def prepare_latents(self, req: Req, generators: list[torch.Generator]) -> torch.Tensor:
        latents: torch.Tensor = self.pipe.prepare_latents(
            req.outputs,
            self._any_denoiser.config.in_channels,
            req.params.height,
            req.params.width,
            req.params.num_frames,
            torch.float32,
            self.device,
            generators,
        )
        return latents

    def batch_key(self, req: Req) -> Hashable:
        return (*super().batch_key(req), self._in_low_noise(req))  # type: ignore[misc]

    def guidance_scale(self, req: Req) -> float:
        scale = req.params.guidance_scale_2 if self._in_low_noise(req) else req.params.guidance_scale
        assert scale is not None
        return scale

    def _in_low_noise(self, req: Req) -> bool:
        """Whether the request's next step belongs to the second expert."""
        ratio = self.pipe.config.boundary_ratio
        if ratio is None or req.timesteps is None:
            return False
        return bool(req.timesteps[req.unit] < ratio * self.pipe.scheduler.config.num_train_timesteps)

    def denoise(
        self, latents: torch.Tensor, timestep: torch.Tensor, branch: dict[str, torch.Tensor], key: Hashable
    ) -> torch.Tensor:
        assert isinstance(key, tuple)
        model = self.pipe.transformer_2 if key[-1] else self.pipe.transformer
        if self.pipe.config.expand_timesteps:
            # One timestep a token: all tokens of a text-to-video request are at the same one.
            _, _, frames, height, width = latents.shape
            timestep = timestep[:, None].expand(-1, frames * ((height + 1) // 2) * ((width + 1) // 2))
        prediction: torch.Tensor = model(latents.to(model.dtype), timestep, return_dict=False, **branch)[0]
        return prediction

    def decode_units(self, req: Req) -> int:
        """One a latent frame."""
        assert req.latents is not None
        return req.latents.shape[2]

    def decode_unit(self, req: Req) -> tuple[torch.Tensor, Any]:
        """As ``AutoencoderKLWan._decode`` does, with its cache of past frames held in the request."""
        vae = self.pipe.vae
        assert req.latents is not None
        frame = req.latents[:, :, req.unit : req.unit + 1].to(vae.dtype)
        mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1).to(frame)
        inverse_std = 1.0 / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1).to(frame)
        frame = vae.post_quant_conv(frame / inverse_std + mean)
        # A slot for each causal convolution; the decoder fills as many as it has.
        cache = [None] * sum(1 for _ in vae.decoder.modules()) if req.decoder is None else list(req.decoder)
        pixels = vae.decoder(frame, feat_cache=cache, feat_idx=[0], first_chunk=req.unit == 0)
        if vae.config.patch_size is not None:
            pixels = unpatchify(pixels, patch_size=vae.config.patch_size)
        return pixels.clamp(-1.0, 1.0), cache
