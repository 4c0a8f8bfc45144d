"""The diffusers schedulers that can drive a flow-matching model, and how to make one from another's configuration."""

from __future__ import annotations

from typing import Any

import diffusers

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
