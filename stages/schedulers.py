"""The diffusers schedulers that can drive a model, and how to make one from another's configuration.

Flow-matching models and those that predict noise or velocity (epsilon, v-prediction) take different ones.
"""

from __future__ import annotations

from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps

from diffgen.errors import InvalidRequest

_OF_FOLDER = "which is the scheduler of this model's folder"
# Short names and the classes they stand for; a class's own name works as well.
FLOW_SCHEDULERS = {
    "euler": "FlowMatchEulerDiscreteScheduler",
    "unipc": "UniPCMultistepScheduler",
    "dpm++": "DPMSolverMultistepScheduler",
}


def flow_names() -> tuple[str, ...]:
    return (*FLOW_SCHEDULERS, *FLOW_SCHEDULERS.values())


def make_flow_scheduler(base: Any, name: str | None, flow_shift: float | None) -> Any:
    """A new scheduler for a flow-matching model.

    Args:
        base: the scheduler of the model's folder.
        name: one of :func:`flow_names`, or None for the class of ``base``.
        flow_shift: shift of the sigmas towards high noise, or None for that of ``base``.
    """
    wanted = type(base) if name is None else getattr(diffusers, FLOW_SCHEDULERS.get(name, name))
    shift = _shift(base) if flow_shift is None else flow_shift
    if wanted is type(base):
        predicts = base.config.get("prediction_type", "flow_prediction")
        if predicts != "flow_prediction":
            # It would step all the same, to noise.
            rule = f"is set to prediction_type {predicts!r}, and this model predicts a flow"
            remedy = f"name another one ({', '.join(FLOW_SCHEDULERS)})"
            raise InvalidRequest(f"{type(base).__name__}, {_OF_FOLDER}, {rule}; {remedy}", param="scheduler")
        # ``from_config`` keeps every other setting of the folder.
        setting = "shift" if "shift" in base.config else "flow_shift"
        return wanted.from_config(base.config, **{setting: shift} if setting in base.config else {})
    steps = base.config.num_train_timesteps
    if wanted is diffusers.FlowMatchEulerDiscreteScheduler:
        return wanted(num_train_timesteps=steps, shift=shift)
    # These know flow matching as one prediction type among others, as diffusers' pages on Wan set them up.
    return wanted(num_train_timesteps=steps, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)


def _shift(scheduler: Any) -> float:
    return float(scheduler.config.get("shift", scheduler.config.get("flow_shift", 1.0)))


def set_timesteps_by_tokens(
    scheduler: Any,
    steps: int | None,
    tokens: int,
    device: torch.device,
    *,
    even: bool = True,
    max_shift: float = 1.15,
) -> None:
    """Set a scheduler whose shift towards high noise grows with the number of image tokens.

    Args:
        even: give it ``steps`` evenly spaced sigmas from 1 to 1 / steps to shift, in place of its own.
        max_shift: of the most tokens, where its settings do not say.
    """
    assert steps is not None
    sigmas = np.linspace(1.0, 1 / steps, steps)
    get = scheduler.config.get
    shift = calculate_shift(
        tokens,
        get("base_image_seq_len", 256),
        get("max_image_seq_len", 4096),
        get("base_shift", 0.5),
        get("max_shift", max_shift),
    )
    retrieve_timesteps(scheduler, steps, device, sigmas=sigmas if even else None, mu=shift)


# Short names of the schedulers of models that predict noise or velocity, as user interfaces have them: the class, and
# the settings that differ from those of the model's folder.
NOISE_SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "pndm": ("PNDMScheduler", {}),
    "ddim": ("DDIMScheduler", {}),
    "ddpm": ("DDPMScheduler", {}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_a": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "lms": ("LMSDiscreteScheduler", {}),
    "dpm2": ("KDPM2DiscreteScheduler", {}),
    "dpm2_a": ("KDPM2AncestralDiscreteScheduler", {}),
    "dpm++": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++"}),
    "dpm++_karras": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++", "use_karras_sigmas": True}),
    "dpm++_sde": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    "dpm++_single": ("DPMSolverSinglestepScheduler", {"algorithm_type": "dpmsolver++"}),
    "deis": ("DEISMultistepScheduler", {}),
    "unipc": ("UniPCMultistepScheduler", {}),
}
# It draws noise of its own, which no seed of the request reaches.
_OWN_NOISE = "DPMSolverSDEScheduler"
# diffusers holds it compatible with all others, but it is for models that were trained for it.
_OWN_MODELS = "EDMEulerScheduler"


def noise_names(base: Any) -> tuple[str, ...]:
    """Names for :func:`make_noise_scheduler`: what diffusers holds compatible with the scheduler of the folder."""
    classes = {kind.__name__ for kind in base.compatibles} - {_OWN_NOISE, _OWN_MODELS} | {type(base).__name__}
    return (*(name for name, (kind, _) in NOISE_SCHEDULERS.items() if kind in classes), *sorted(classes))


def make_noise_scheduler(base: Any, name: str | None) -> Any:
    """A new scheduler for a model that predicts noise or velocity, with the settings of the folder.

    Args:
        base: the scheduler of the model's folder.
        name: one of :func:`noise_names`, or None for the class of ``base``.
    """
    kind, settings = NOISE_SCHEDULERS.get(name or "", (name, {}))
    wanted = type(base) if kind is None else getattr(diffusers, kind)
    if wanted.__name__ == _OWN_NOISE:
        rule = "draws noise that no seed reaches; name another scheduler"
        raise InvalidRequest(f"{_OWN_NOISE}, {_OF_FOLDER}, {rule}", param="scheduler")
    return wanted.from_config(base.config, **settings)


def least_steps(scheduler: Any) -> int:
    """The fewest steps that the scheduler's settings allow: one that ends at a noise of its own needs a first step."""
    return 2 if scheduler.config.get("shift_terminal") else 1
