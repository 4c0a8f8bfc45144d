"""ComposedPipelineBase: what a family's file fills in."""

from __future__ import annotations

import abc
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import torch

from diffgen.args import ModelArgs
from diffgen.distributed.decode import DecodeRule
from diffgen.distributed.dims import Abilities
from diffgen.distributed.layout import Layout
from diffgen.distributed.sequence import SequencePlan
from diffgen.distributed.tensor import TensorPlan
from diffgen.errors import InvalidRequest, ModelError
from diffgen.loading.components import load_components
from diffgen.loading.hub import model_name
from diffgen.loading.index import ModelIndex
from diffgen.params import BATCH_FIELDS, NO_LIMITS, ModelSpec, SamplingParams, is_guided, parse_params, resolve
from diffgen.request import Req
from diffgen.worker.context import StageContext
from pipelines.parallel import denoiser_abilities, sliced_components, split_models
from stages.base import PipelineStage
from stages.decode import DecodingStage
from stages.denoise import DenoisingStage, scaled, step
from stages.preview import Previewer, make_previewer


class ComposedPipelineBase(abc.ABC):
    """A model family as stages in order.

    A family's file says which diffusers pipelines it serves, the stages, the defaults and limits, and how to call its
    encoder, denoiser and decoder: the methods that its stages' protocols ask for. The weights come as the family's own
    diffusers pipeline, whose public methods a family may use through a shallow copy that holds a request's scheduler.
    """

    #: ``_class_name`` in model_index.json of the models this family serves.
    serves: ClassVar[tuple[str, ...]]
    #: Components that are loaded in float32 whatever dtype is asked for.
    float32_components: ClassVar[frozenset[str]] = frozenset()

    #: How tensor parallelism cuts components, by name, beside what their classes and ``pipelines.plans`` say.
    tensor_plans: ClassVar[Mapping[str, TensorPlan]] = {}
    #: How the denoiser's tokens are split, where its class in diffusers does not say so.
    sequence_plan: ClassVar[SequencePlan | None] = None
    #: How modules of the VAE's decoder are split, by class, beside the layers that all families have.
    decode_rules: ClassVar[Mapping[str, DecodeRule]] = {}
    #: Whether requests are guided unless they ask otherwise, so that two groups of ranks have work.
    usually_guided: ClassVar[bool] = False

    def __init__(self, index: ModelIndex, model: ModelArgs, device: torch.device, layout: Layout | None = None) -> None:
        self.device = device
        self.layout = layout or Layout()
        plans = sliced_components(index, self.tensor_plans, tp) if (tp := self.layout.dims.tp) > 1 else {}
        self.pipe: Any = load_components(index, model, device, self.float32_components, plans, self.layout.tp)
        self.splits_decode = split_models(self.pipe, self.layout, self.sequence_plan, self.decode_rules)
        self.spec = self.make_spec(index, model_name(model))
        self.stages = self.make_stages()
        self.preview: Previewer | None = None
        if any(isinstance(stage, DecodingStage) for stage in self.stages):
            whole: Any = self  # with what its stages ask for
            self.preview = None if device.type == "meta" else make_previewer(whole)
            if device.type == "meta" or self.preview is not None:
                self.spec = msgspec.structs.replace(self.spec, takes=(*self.spec.takes, "preview_every"))
        defaults = _check_defaults(index, self.spec)
        if device.type != "meta":
            _check_scheduler(index, self.stages, Req("check", defaults), device)

    @classmethod
    def load(
        cls, index: ModelIndex, model: ModelArgs, device: torch.device, layout: Layout | None = None
    ) -> ComposedPipelineBase:
        """Check that the family can serve the model, then load it. Raises :class:`ModelError`."""
        if index.pipeline_class not in cls.serves:
            rule = f"{cls.__name__} serves {', '.join(cls.serves)}"
            raise ModelError(f"{index.folder} is a {index.pipeline_class}; {rule}", code="unsupported_model")
        return cls(index, model, device, layout)

    @classmethod
    def abilities(cls, index: ModelIndex) -> Abilities:
        """By what the model can be split, from its configuration alone."""
        return denoiser_abilities(index, cls.tensor_plans, cls.usually_guided, cls.sequence_plan)

    @abc.abstractmethod
    def make_stages(self) -> Sequence[PipelineStage]:
        """The stages, in order; the first has a unit for every request."""

    @abc.abstractmethod
    def make_spec(self, index: ModelIndex, name: str) -> ModelSpec:
        """Defaults and limits of the loaded model."""

    def defaults(self, index: ModelIndex, family: Mapping[str, Any]) -> dict[str, Any]:
        """The family's defaults, overridden by those of the model's own ``diffgen.json``."""
        return {**family, **index.defaults}

    def cut_warnings(
        self,
        tokenizer: Any,
        texts: Mapping[str, str],
        length: int | None,
        *,
        encoder: str = "the encoder",
        template: str = "{}",
        start: int = 0,
        end_token: bool = True,
    ) -> tuple[str, ...]:
        """A warning for each text of which the encoder reads only the first ``length`` tokens, with the lost tail.

        Args:
            texts: those that are encoded, as the tokenizer gets them, by parameter name.
            encoder: which one, where a model has several.
            template: what stands around each text; of its tokens the first ``start`` do not count.
            end_token: whether the last place read is that of a token which the tokenizer adds.
        """
        warnings = []
        for name, text in texts.items():
            whole = template.format(text)
            encoded = tokenizer(whole, truncation=False, return_offsets_mapping=tokenizer.is_fast)
            count = len(encoded.input_ids) - start
            if length is not None and count > length:
                first = start + length - end_token
                lost = whole[encoded.offset_mapping[first][0] :] if tokenizer.is_fast else "its end"
                tokens = "tokens" if template == "{}" else "tokens with the end of its template"
                warnings.append(f"{name} has {count} {tokens} and {encoder} reads {length}; cut off: {lost!r:.200}")
        return tuple(warnings)

    def latent_image(self, latents: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        """The denoiser's latents as (n, C, T, h, w). Families that pack them replace it."""
        return latents if latents.ndim == 5 else latents[:, :, None]

    def set_timesteps(self, scheduler: Any, req: Req) -> None:
        """Set a request's scheduler to its steps. Families with a schedule of their own replace it."""
        steps = req.params.num_inference_steps
        try:
            scheduler.set_timesteps(steps, device=self.device)
        except ValueError as error:
            rule = f"{type(scheduler).__name__} has no such schedule ({error})"
            remedy = "use another number of steps or another scheduler"
            raise InvalidRequest(
                f"num_inference_steps {steps}: {rule}; {remedy}", param="num_inference_steps"
            ) from None

    def batch_key(self, req: Req) -> Hashable:
        """What must be equal for two requests to share a forward: the fields marked for it. Families add theirs."""
        return tuple(getattr(req.params, name) for name in BATCH_FIELDS)

    def guide(self, predictions: Sequence[torch.Tensor], req: Req) -> torch.Tensor:
        """Classifier-free guidance (Ho and Salimans, 2022) of (n, ...) predictions, conditional first."""
        if len(predictions) == 1:
            return predictions[0]
        conditional, unconditional = predictions
        return unconditional + self.guidance_scale(req) * (conditional - unconditional)

    def guidance_scale(self, req: Req) -> float:
        """The scale of classifier-free guidance in the request's next step."""
        assert self.spec.guidance is not None
        scale: float = getattr(req.params, self.spec.guidance)
        return scale

    def is_guided(self, req: Req) -> bool:
        return is_guided(req.params, self.spec)


def _check_defaults(index: ModelIndex, spec: ModelSpec) -> SamplingParams:
    """The model's defaults. Raises :class:`ModelError` for those that it would refuse if a request asked for them."""
    try:
        return resolve(parse_params({"prompt": "", **spec.defaults}), spec, NO_LIMITS).params
    except InvalidRequest as error:
        raise ModelError(f"a default of {index.folder} (diffgen.json, or its family's): {error}") from None


def _check_scheduler(index: ModelIndex, stages: Sequence[PipelineStage], req: Req, device: torch.device) -> None:
    """Let the folder's scheduler take a step from a request's first latents, without the denoiser or a text.

    Raises :class:`ModelError` where it cannot: every request would fail.
    """
    if not any(isinstance(stage, DenoisingStage) for stage in stages):
        return
    context = StageContext(device, lambda predict, rows: predict(rows))
    try:
        with torch.inference_mode():
            for stage in stages:
                if stage.prepares and not stage.encodes:
                    stage.run([req], context)[0].apply(req)
            _, latents = scaled(req, req.scheduler)
            step(req, req.scheduler, torch.zeros_like(latents))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        own = (index.components.get("scheduler") or ("", "?"))[1]
        name = own if req.scheduler is None else type(req.scheduler).__name__
        rule = f"its scheduler, {name}, cannot drive a {index.pipeline_class} ({type(error).__name__}: {error})"
        remedy = "put another one into its folder scheduler/ and into model_index.json"
        raise ModelError(f"cannot serve {index.folder}: {rule}; {remedy}", code="unsupported_model") from error
