"""Which schedulers drive which kind of model, and whose settings they have."""

from __future__ import annotations

import diffusers
import pytest

from diffgen.errors import InvalidRequest
from stages.schedulers import NOISE_SCHEDULERS, make_flow_scheduler, make_noise_scheduler, noise_names

# diffusers' own, of schedulers that mix tensors and numpy.
pytestmark = pytest.mark.filterwarnings("ignore:__array:DeprecationWarning")


def test_names_are_what_diffusers_holds_compatible_and_a_seed_reaches() -> None:
    base = diffusers.PNDMScheduler()
    names = noise_names(base)
    classes = {kind.__name__ for kind in base.compatibles}
    assert {name for name in names if name.endswith("Scheduler")} <= classes
    assert classes - set(names) == {"DPMSolverSDEScheduler", "EDMEulerScheduler"}
    assert set(NOISE_SCHEDULERS) <= set(names)
    assert len(set(names)) == len(names)


def test_the_class_of_the_folder_is_always_known() -> None:
    base = diffusers.LCMScheduler()
    assert "LCMScheduler" in noise_names(base)
    assert type(make_noise_scheduler(base, None)) is diffusers.LCMScheduler


@pytest.mark.parametrize("name", [None, *NOISE_SCHEDULERS, "EulerDiscreteScheduler"])
def test_the_settings_of_the_folder_are_kept(name: str | None) -> None:
    settings = {"beta_end": 0.0123, "beta_schedule": "scaled_linear", "prediction_type": "v_prediction"}
    base = diffusers.DDIMScheduler(**settings, steps_offset=1, clip_sample=False)
    made = make_noise_scheduler(base, name)
    kind, own = NOISE_SCHEDULERS.get(name or "", (name or "DDIMScheduler", {}))
    assert type(made).__name__ == kind
    assert made is not base
    assert {setting: made.config[setting] for setting in settings} == settings
    assert {setting: made.config[setting] for setting in own} == own


def test_a_class_name_keeps_the_kind_of_solver_and_a_short_name_sets_it() -> None:
    base = diffusers.DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++")
    by_class = make_noise_scheduler(base, "DPMSolverMultistepScheduler")
    assert by_class.config.algorithm_type == "sde-dpmsolver++"
    assert make_noise_scheduler(base, "dpm++").config.algorithm_type == "dpmsolver++"


def test_noise_that_no_seed_reaches_is_refused() -> None:
    class DPMSolverSDEScheduler(diffusers.EulerDiscreteScheduler):
        """Of the name alone: diffusers' own needs a library that is not installed."""

    with pytest.raises(InvalidRequest, match="no seed reaches; name another scheduler"):
        make_noise_scheduler(DPMSolverSDEScheduler(), None)


def test_a_scheduler_for_noise_drives_no_flow() -> None:
    base = diffusers.EulerDiscreteScheduler()
    rule = (
        "EulerDiscreteScheduler, .* is set to prediction_type 'epsilon', and this model predicts a flow; name another"
    )
    with pytest.raises(InvalidRequest, match=rule):
        make_flow_scheduler(base, None, None)
    assert type(make_flow_scheduler(base, "euler", None)) is diffusers.FlowMatchEulerDiscreteScheduler
    base = diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    assert type(make_flow_scheduler(base, None, None)) is diffusers.UniPCMultistepScheduler
