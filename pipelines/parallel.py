"""How a family's models are split over ranks: from outside, into models that know nothing of it."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Mapping
from typing import Any

import diffusers
import transformers

from diffgen.distributed.decode import DecodeRule, split_decode, why_not_decode
from diffgen.distributed.dims import Abilities
from diffgen.distributed.layout import Layout
from diffgen.distributed.sequence import SequencePlan, split_tokens, why_not_sequence
from diffgen.distributed.tensor import TensorPlan, class_plan
from diffgen.loading.index import ModelIndex

logger = logging.getLogger(__name__)

DENOISERS = ("transformer", "transformer_2")
_T5_HEADS = {"encoder.block.*.layer.0.SelfAttention": ("n_heads", "inner_dim")}
_T5 = TensorPlan(
    {
        "encoder.block.*.layer.0.SelfAttention.q": "colwise",
        "encoder.block.*.layer.0.SelfAttention.k": "colwise",
        "encoder.block.*.layer.0.SelfAttention.v": "colwise",
        "encoder.block.*.layer.0.SelfAttention.o": "rowwise",
        # A column a head; T5 has it in its first layer, UMT5 in every one.
        "encoder.block.*.layer.0.SelfAttention.relative_attention_bias": "colwise",
        "encoder.block.*.layer.1.DenseReluDense.wi": "colwise",
        "encoder.block.*.layer.1.DenseReluDense.wi_0": "colwise",
        "encoder.block.*.layer.1.DenseReluDense.wi_1": "colwise",
        "encoder.block.*.layer.1.DenseReluDense.wo": "rowwise",
    },
    heads=_T5_HEADS,
)
#: Of text encoders, by class.
ENCODER_PLANS = {"T5EncoderModel": _T5, "UMT5EncoderModel": _T5}
#: Text encoders with a plan of transformers' own, and where in them the language model is. Others are whole everywhere.
OWN_PLANS = {"LlamaModel": "", "Qwen2_5_VLForConditionalGeneration": "model.language_model."}


def denoiser_abilities(
    index: ModelIndex, plans: Mapping[str, TensorPlan], guided: bool, sequence: SequencePlan | None = None
) -> Abilities:
    """What a denoiser's class and configuration allow, and plans of the family's own."""
    name = next((each for each in DENOISERS if index.components.get(each)), None)
    if name is None:
        reason = "its denoiser is a UNet, whose convolutions see a picture and no tokens"
        return Abilities(tensor=reason, sequence=reason, guided=guided)
    kind = _class_of(index, name)
    why_not_tensor = "" if name in plans or class_plan(kind) else f"there is no plan for slicing a {kind.__name__}"
    heads = _setting(index, name, kind, "num_attention_heads")
    why_not_tokens = why_not_sequence(kind) if sequence is None else ""
    return Abilities(heads, why_not_tensor, why_not_tokens if heads else "it has no heads", "", guided)


def sliced_components(index: ModelIndex, plans: Mapping[str, TensorPlan], tp: int) -> dict[str, TensorPlan]:
    """The components of which each of ``tp`` ranks reads slices."""
    found = {}
    for name, kind in index.components.items():
        plan = plans.get(name)
        if plan is None and kind is not None:
            plan = class_plan(_class_of(index, name)) if name in DENOISERS else _encoder_plan(index, name, kind[1], tp)
        if kind is not None and plan is not None:
            found[name] = plan
    return found


def _encoder_plan(index: ModelIndex, name: str, kind: str, tp: int) -> TensorPlan | None:
    if kind not in OWN_PLANS:
        return ENCODER_PLANS.get(kind)
    config = getattr(transformers, kind).config_class.from_pretrained(index.folder / name).get_text_config()
    counts = (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size)
    if any(count % tp for count in counts):
        logger.info("%s is whole on every rank: not all of %s divide by tp_size %d", name, counts, tp)
        return None
    return TensorPlan({OWN_PLANS[kind] + pattern: style for pattern, style in config.base_model_tp_plan.items()})


def split_models(
    pipe: Any, layout: Layout, sequence: SequencePlan | None, decode_rules: Mapping[str, DecodeRule]
) -> bool:
    """Put what a layout needs inside forwards into the loaded models: hooks around tokens and a decode's rows.

    ``sequence`` is the family's own plan for its denoiser's tokens, and ``decode_rules`` those for its VAE. Returns
    whether the decode is split.
    """
    if layout.attention is not None:
        for name in DENOISERS:
            if getattr(pipe, name, None) is not None:
                split_tokens(getattr(pipe, name), layout.sequence, layout.attention, sequence)
    vae = getattr(pipe, "vae", None)
    if layout.decode.size == 1 or vae is None:
        return False
    reason = why_not_decode(vae, decode_rules)
    if reason:
        logger.info("every rank decodes the whole: %s", reason)
    else:
        split_decode(vae, layout.decode, decode_rules)
    return not reason


def _class_of(index: ModelIndex, name: str) -> Any:
    kind = index.components[name]
    assert kind is not None
    return getattr(diffusers, kind[1])


def _setting(index: ModelIndex, name: str, kind: Any, setting: str) -> int:
    config = json.loads((index.folder / name / "config.json").read_text(encoding="utf-8"))
    default = inspect.signature(kind.__init__).parameters.get(setting)
    value = config.get(setting, None if default is None else default.default)
    return value if isinstance(value, int) else 0
