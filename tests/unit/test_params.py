"""The one validator of what a user asks for."""

from __future__ import annotations

import math
import time
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffgen.errors import InvalidRequest
from diffgen.params import (
    BATCH_FIELDS,
    MAX_SEED,
    MAX_TEXT,
    Limits,
    ModelSpec,
    SamplingParams,
    is_guided,
    nearest_steps,
    parse_params,
    parse_size,
    rational_fps,
    resolve,
)

# More digits than Python prints.
HUGE = pytest.param(10**5000, id="huge")


def parse(**values: Any) -> SamplingParams:
    return parse_params({"prompt": "a cat", **values})


def resolved(model: ModelSpec, limits: Limits | None = None, **values: Any) -> SamplingParams:
    return resolve(parse(**values), model, limits or Limits()).params


def warnings(model: ModelSpec, **values: Any) -> str:
    return " | ".join(resolve(parse(**values), model, Limits()).warnings)


def refused(**values: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(**values)
    return caught.value


# Types


@pytest.mark.parametrize("seed", [True, "7", 1.0, 1.5, -1, 2**63, 2**64, 10**30, -(10**400), HUGE, [1], b"1"])
def test_seed_takes_only_integers_of_63_bits(seed: object) -> None:
    error = refused(seed=seed)
    assert (error.param, error.code) == ("seed", "invalid_seed")
    assert len(error.message) < 400


@pytest.mark.parametrize("seed", [0, 1, 2**53 + 1, MAX_SEED])
def test_seed_is_kept_exactly(seed: int) -> None:
    assert parse(seed=seed).seed == seed


def test_seed_of_the_last_image_must_fit_too() -> None:
    assert parse(seed=MAX_SEED - 3, n=4).seed == MAX_SEED - 3
    error = refused(seed=MAX_SEED - 2, n=4)
    assert error.param == "seed"
    assert "smaller seed" in error.message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -5, "5", True, None, 1e999, [5.0], HUGE])
def test_guidance_takes_only_finite_numbers(value: object) -> None:
    if value is None:
        assert parse(guidance_scale=None).guidance_scale is None
    else:
        assert refused(guidance_scale=value).param == "guidance_scale"


@pytest.mark.parametrize("field", ["width", "height", "num_frames", "num_inference_steps", "n", "max_sequence_length"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "8", True, 2**63, HUGE])
def test_counts_are_integers_from_1(field: str, value: object) -> None:
    error = refused(**{field: value})
    assert error.param == ("num_outputs_per_prompt" if field == "n" else field)
    assert "must" in error.message


def test_an_integer_is_good_where_a_number_is_asked_for() -> None:
    params = parse(guidance_scale=0, fps=24, seconds=2)
    assert (params.guidance_scale, params.fps, params.seconds) == (0.0, 24.0, 2.0)


def test_numbers_and_texts_of_numpy_are_taken() -> None:
    params = parse_params(
        {"prompt": np.str_("a"), "seed": np.int64(5), "guidance_scale": np.float32(2.5), "fps": Fraction(24000, 1001)}
    )
    assert (params.prompt, params.seed, params.guidance_scale) == ("a", 5, 2.5)
    assert type(params.prompt) is str
    assert type(params.seed) is int
    assert rational_fps(params.fps or 0) == Fraction(24000, 1001)


@pytest.mark.parametrize("value", [np.array([1, 2]), np.bool_(True), np.float64(5)])
def test_arrays_and_others_of_numpy_are_refused_as_seed(value: object) -> None:
    assert refused(seed=value).param == "seed"


# Names


def test_unknown_names_are_refused_with_the_near_one() -> None:
    error = refused(sede=1)
    assert (error.code, error.param) == ("unknown_parameter", "sede")
    assert "did you mean 'seed'" in error.message
    for other, ours in {
        "steps": "num_inference_steps", "cfg_scale": "guidance_scale", "sampler_name": "scheduler",
        "num_images_per_prompt": "num_outputs_per_prompt", "frame_count": "num_frames", "frame_rate": "fps",
        "CLIP_stop_at_last_layers": "clip_skip", "duration": "seconds", "image_size": "size",
    }.items():  # fmt: skip
        assert refused(**{other: 1}).message.endswith(f"did you mean {ours!r}?")
    assert "known: clip_skip, " in refused(init_images=[]).message
    began = time.monotonic()
    told = refused(**{"x" * 4_000_000: 1}).message
    assert time.monotonic() - began < 1
    assert "known: clip_skip, " in told
    assert len(told) < 1000


def test_a_name_far_from_all_lists_them() -> None:
    assert "num_inference_steps" in refused(qqqqqqqq=1).message


def test_n_is_an_alias_that_excludes_its_other_name() -> None:
    assert parse(n=2).num_outputs_per_prompt == 2
    for values in ({"n": 2, "num_outputs_per_prompt": 2}, {"num_outputs_per_prompt": 2, "n": 3}):
        error = refused(**values)
        assert "n and " in error.message or " and n " in error.message
        assert "num_outputs_per_prompt" in error.message


def test_output_type_names_the_choices() -> None:
    assert "'latent'" in refused(output_type="jpg").message


# Texts


@pytest.mark.parametrize("prompt", ["", "   ", "😀", "a\nb", "猫" * 300, "%s {x} \\", "-rf"])
def test_odd_prompts_are_fine(prompt: str) -> None:
    assert parse_params({"prompt": prompt}).prompt == prompt


@pytest.mark.parametrize("prompt", ["\ud800", "a\0b", ["a", "b"], 5, {"a": 1}, b"a"])
def test_prompts_that_are_no_text_are_refused(prompt: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_params({"prompt": prompt})
    assert caught.value.param == "prompt"
    caught.value.message.encode()  # it must be possible to print it


@pytest.mark.parametrize("values", [{}, {"prompt": None}])
def test_a_missing_prompt_is_said(values: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_params(values)
    assert caught.value.code == "missing_parameter"


@pytest.mark.parametrize("field", ["negative_prompt", "size", "scheduler"])
def test_text_rules_hold_for_every_text(field: str) -> None:
    assert refused(**{field: "a\0"}).param == field


def test_a_text_larger_than_a_message_is_refused_by_the_client() -> None:
    # The server's socket would cut the connection, again at each attempt.
    error = refused(negative_prompt="é" * (MAX_TEXT // 2 + 1))
    assert error.code == "negative_prompt_too_long"
    assert str(MAX_TEXT) in error.message


# Sizes


@pytest.mark.parametrize(
    "size",
    [
        "",
        "0x0",
        "-64x64",
        "64",
        "64x",
        "x64",
        "64X64",
        " 64x64",
        "64x64 ",
        "64x64\n",
        "64x64x3",
        "1e2x64",
        "64*64",
        "064x64",
        "9999999x64",
        "６４x64",
        "Auto",
        "64.0x64",
    ],
)
def test_size_has_a_strict_grammar(model: ModelSpec, size: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolved(model, size=size)
    assert caught.value.code == "invalid_size"
    assert "WIDTHxHEIGHT" in caught.value.message


def test_size_becomes_width_and_height(model: ModelSpec) -> None:
    params = resolved(model, size="96x48")
    assert (params.size, params.width, params.height) == (None, 96, 48)


def test_auto_is_the_models_own_size(model: ModelSpec) -> None:
    assert parse_size("auto") is None
    assert (resolved(model, size="auto").width, resolved(model).height) == (128, 64)


@pytest.mark.parametrize(
    ("values", "legal"),
    [
        ({"size": "100x64"}, "96 or 112"),
        ({"width": 100}, "96 or 112"),
        ({"height": 8}, "nearest: 16"),
        ({"width": 1}, "16"),
    ],
)
def test_a_size_off_the_grid_names_the_nearest(model: ModelSpec, values: dict[str, Any], legal: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolved(model, **values)
    assert caught.value.code == "invalid_size"
    assert legal in caught.value.message
    assert "16" in caught.value.message


def test_size_against_width_is_refused_unless_they_agree(model: ModelSpec) -> None:
    assert resolved(model, size="64x64", width=64).width == 64
    with pytest.raises(InvalidRequest, match="give one of them"):
        resolved(model, size="64x64", height=128)


# Frames


@pytest.mark.parametrize("frames", [1, 5, 9, 81])
def test_frames_of_4k_plus_1_are_taken(model: ModelSpec, frames: int) -> None:
    assert resolved(model, num_frames=frames).num_frames == frames


@pytest.mark.parametrize(("frames", "legal"), [(2, "1 or 5"), (4, "1 or 5"), (8, "5 or 9"), (80, "77 or 81")])
def test_other_frames_name_the_nearest(model: ModelSpec, frames: int, legal: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolved(model, num_frames=frames)
    assert caught.value.param == "num_frames"
    assert legal in caught.value.message


@pytest.mark.parametrize(
    ("seconds", "fps", "frames"), [(5, 16, 81), (4, 16, 65), (0.01, 16, 1), (1, 8, 9), (5, 23.976, 121), (1, 5, 5)]
)
def test_seconds_are_rounded_to_frames_and_said(model: ModelSpec, seconds: float, fps: float, frames: int) -> None:
    answer = resolve(parse(seconds=seconds, fps=fps), model, Limits())
    assert answer.params.num_frames == frames
    assert answer.params.seconds is None
    assert bool([text for text in answer.warnings if "makes" in text]) == (frames != seconds * fps)


def test_num_frames_beats_seconds_and_says_so(model: ModelSpec) -> None:
    assert resolved(model, seconds=5, num_frames=5).num_frames == 5
    assert "seconds=5.0 has no effect" in warnings(model, seconds=5, num_frames=5)


def test_seconds_without_end_are_refused(model: ModelSpec) -> None:
    for seconds in (1e15, 1e12):
        with pytest.raises(InvalidRequest, match="too long"):
            resolved(model, seconds=seconds)
    with pytest.raises(InvalidRequest, match="limit"):
        resolved(model, seconds=10_000)


def test_a_model_of_still_images_takes_no_clip(model: ModelSpec) -> None:
    still = msgspec.structs.replace(model, frame_stride=0, defaults={"width": 64, "height": 64, "num_frames": 1})
    assert resolved(still).num_frames == 1
    for values in ({"num_frames": 5}, {"seconds": 2}):
        with pytest.raises(InvalidRequest, match="still images"):
            resolved(still, None, **values)


@pytest.mark.parametrize("fps", [0, -1, 241, 1e-4, math.nan])
def test_fps_has_a_range(fps: float) -> None:
    assert refused(fps=fps).param == "fps"


def test_fps_of_a_still_image_has_no_effect_and_says_so(model: ModelSpec) -> None:
    assert "fps=8.0 has no effect" in warnings(model, num_frames=1, fps=8)
    assert "fps" not in warnings(model, num_frames=1)


@pytest.mark.parametrize(
    ("fps", "exact"),
    [
        (23.976, Fraction(24000, 1001)),
        (23.98, Fraction(24000, 1001)),
        (29.97, Fraction(30000, 1001)),
        (16, 16),
        (8.0, 8),
        (59.94, Fraction(60000, 1001)),
        (12.5, Fraction(25, 2)),
        (0.5, Fraction(1, 2)),
        (0.997, Fraction(997, 1000)),
        (1e-4, Fraction(1, 10000)),
        (24000 / 1001, Fraction(24000, 1001)),
    ],
)
def test_decimal_rates_become_exact(fps: float, exact: Fraction) -> None:
    assert rational_fps(fps) == exact


@given(st.floats(min_value=0.01, max_value=240))
def test_rates_stay_positive_and_near(fps: float) -> None:
    assert rational_fps(fps) > 0
    assert abs(float(rational_fps(fps)) - fps) <= max(0.005, fps * 0.05)


@pytest.mark.parametrize("fps", [0, -1.0, math.inf, math.nan])
def test_rates_that_mean_nothing_are_refused(fps: float) -> None:
    with pytest.raises(InvalidRequest):
        rational_fps(fps)


# Defaults, and zero as a value


def test_unset_fields_take_the_models_defaults(model: ModelSpec) -> None:
    params = resolved(model)
    for name, value in model.defaults.items():
        assert getattr(params, name) == value, name
    assert params.num_outputs_per_prompt == 1


def test_zero_is_a_value(model: ModelSpec) -> None:
    params = resolved(model, guidance_scale=0, seed=0)
    assert (params.guidance_scale, params.seed) == (0.0, 0)
    assert not is_guided(params, model)


def test_a_missing_seed_is_drawn_and_small_enough_for_javascript(model: ModelSpec) -> None:
    seeds = {resolved(model, n=16).seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(seed is not None and 0 <= seed < 2**53 - 16 for seed in seeds)


@given(
    values=st.fixed_dictionaries(
        {},
        optional={
            "guidance_scale": st.floats(0, 20),
            "num_frames": st.sampled_from([1, 5, 9]),
            "seconds": st.floats(0.1, 5),
            "fps": st.sampled_from([8.0, 16.0, 23.976]),
            "size": st.sampled_from(["64x64", "128x96", "auto"]),
            "n": st.integers(1, 4),
            "negative_prompt": st.text("ab", max_size=3),
            "seed": st.integers(0, 2**40),
        },
    )
)
def test_resolved_parameters_resolve_to_themselves(values: dict[str, Any]) -> None:
    """The reply's parameters, sent again, ask for the same thing."""
    model = ModelSpec(
        name="m",
        family="f",
        defaults={"width": 64, "height": 64, "num_frames": 5, "fps": 16.0, "guidance_scale": 5.0},
        size_multiple=16,
        frame_stride=4,
        guidance_off=1.0,
    )
    params = resolved(model, **values)
    again = parse_params({name: getattr(params, name) for name in params.__struct_fields__})
    assert resolve(again, model, Limits()).params == params


# Limits


@pytest.mark.parametrize(
    ("limits", "values", "param"),
    [
        ({"steps": 10}, {"num_inference_steps": 11}, "num_inference_steps"),
        ({"frames": 5}, {"num_frames": 9}, "num_frames"),
        ({"pixels": 64 * 64}, {"size": "80x64"}, "size"),
        ({"pixels": 64 * 64}, {"width": 2**40, "height": 2**40}, "size"),
        ({"images": 2}, {"n": 3}, "num_outputs_per_prompt"),
        ({"prompt": 10}, {"negative_prompt": "a" * 11}, "negative_prompt"),
        ({"steps": 10}, {}, "num_inference_steps"),
    ],
)
def test_limits_name_value_limit_and_remedy(
    model: ModelSpec, limits: dict[str, int], values: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolved(model, Limits(**limits), **values)
    assert caught.value.param == param
    assert str(next(iter(limits.values()))) in caught.value.message
    assert "limit" in caught.value.message


def test_what_is_at_the_limit_is_taken(model: ModelSpec) -> None:
    limits = Limits(steps=10, frames=9, pixels=64 * 64, images=2, prompt=5)
    assert resolved(model, limits, num_inference_steps=10, num_frames=9, size="64x64", n=2).num_inference_steps == 10


# Guidance


def test_a_negative_prompt_without_guidance_says_that_it_has_no_effect(model: ModelSpec) -> None:
    assert "negative_prompt has no effect" in warnings(model, negative_prompt="b", guidance_scale=1)
    assert "negative_prompt" not in warnings(model, negative_prompt="b", guidance_scale=1.1)
    assert "negative_prompt" not in warnings(model, negative_prompt="", guidance_scale=1)
    turbo = msgspec.structs.replace(model, guidance=None)
    assert "no classifier-free guidance" in warnings(turbo, negative_prompt="b")


def test_guidance_that_needs_a_negative_prompt(model: ModelSpec) -> None:
    needs = msgspec.structs.replace(
        model,
        guidance="true_cfg_scale",
        guidance_needs_negative=True,
        takes=("true_cfg_scale", "guidance_scale"),
        defaults=model.defaults | {"true_cfg_scale": 1.0},
    )
    assert "only with a negative_prompt" in warnings(needs, true_cfg_scale=2)
    assert "only with a negative_prompt" not in warnings(needs, true_cfg_scale=2, negative_prompt="")
    for text in ("", "b"):
        assert "negative_prompt has no effect: true_cfg_scale 1.0 is off" in warnings(needs, negative_prompt=text)
    assert resolved(needs).guidance_scale == 5.0
    # What is resolved says the same when it is asked for again: a default without effect is not filled in.
    on = msgspec.structs.replace(needs, defaults=needs.defaults | {"true_cfg_scale": 4.0})
    assert resolved(on).true_cfg_scale is None
    assert resolved(on, negative_prompt="").true_cfg_scale == 4.0
    assert resolved(on, true_cfg_scale=2).true_cfg_scale == 2.0
    assert "guidance_scale" not in warnings(needs, guidance_scale=3)


def test_a_guidance_scale_that_the_model_does_not_read_says_so(model: ModelSpec) -> None:
    for guidance in (None, "true_cfg_scale"):
        turbo = msgspec.structs.replace(model, guidance=guidance)
        assert "guidance_scale has no effect" in warnings(turbo, guidance_scale=0)
        assert "guidance_scale" not in warnings(turbo)
        assert resolved(turbo, guidance_scale=3).guidance_scale is None


def test_a_model_without_a_default_scale_is_not_guided(model: ModelSpec) -> None:
    bare = msgspec.structs.replace(model, defaults={"num_frames": 1, "width": 64, "height": 64})
    assert "negative_prompt has no effect" in warnings(bare, negative_prompt="b")


def test_the_second_scale_belongs_to_models_with_two_experts(model: ModelSpec) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolved(model, guidance_scale_2=3)
    assert caught.value.code == "unsupported_parameter"
    two = msgspec.structs.replace(model, takes=(*model.takes, "guidance_scale_2"))
    assert resolved(two, guidance_scale=4).guidance_scale_2 == 4
    assert resolved(two, guidance_scale=4, guidance_scale_2=0).guidance_scale_2 == 0
    assert "guidance_scale_2 has no effect" in warnings(two, guidance_scale=1, guidance_scale_2=3)


# Sampler


def test_fewer_steps_than_the_schedule_has_are_refused(model: ModelSpec) -> None:
    ends_early = msgspec.structs.replace(model, least_steps=2)
    with pytest.raises(InvalidRequest) as caught:
        resolved(ends_early, num_inference_steps=1)
    assert caught.value.param == "num_inference_steps"
    assert "at least 2" in caught.value.message
    assert resolved(ends_early, num_inference_steps=2).num_inference_steps == 2


def test_sampler_fields_are_checked_against_the_model(model: ModelSpec) -> None:
    assert resolved(model, scheduler="unipc", flow_shift=3).flow_shift == 3
    with pytest.raises(InvalidRequest, match="takes: euler, unipc"):
        resolved(model, scheduler="ddim")
    with pytest.raises(InvalidRequest, match="512") as caught:
        resolved(model, max_sequence_length=513)
    assert "use 512 or less" in caught.value.message
    with pytest.raises(InvalidRequest, match="takes no flow_shift"):
        resolved(msgspec.structs.replace(model, takes=()), flow_shift=3)


# The table itself


def test_batch_fields_are_those_that_shape_the_forward() -> None:
    assert set(BATCH_FIELDS) == {"width", "height", "num_frames", "max_sequence_length"}


def test_every_field_has_help_and_only_the_prompt_is_required() -> None:
    for field in msgspec.structs.fields(SamplingParams):
        assert field.required == (field.name == "prompt")
        assert field.default in (msgspec.NODEFAULT, None, "pil"), "None is the only unset"


@given(st.integers(1, 10_000), st.integers(1, 64), st.integers(0, 1))
def test_nearest_values_are_legal_and_around(value: int, step: int, offset: int) -> None:
    legal = [int(part) for part in nearest_steps(value, step, offset).split(" or ")]
    assert all((number - offset) % step == 0 and number >= 1 for number in legal)
    assert any(number >= value for number in legal)


@given(
    st.dictionaries(
        st.sampled_from([*SamplingParams.__struct_fields__, "n", "sede"]),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=5)
        | st.lists(st.integers(), max_size=2),
        max_size=5,
    )
)
def test_whatever_is_given_is_parsed_or_refused_with_a_name(values: dict[str, Any]) -> None:
    try:
        params = parse_params(values)
    except InvalidRequest as error:
        params, refusal = None, error
    if params is None:
        assert refusal.param in (*values, *SamplingParams.__struct_fields__)
        assert refusal.message
    else:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(("skip", "ok"), [(None, True), (0, True), (2, True), (3, False)])
def test_no_more_layers_are_left_out_than_there_are(model: ModelSpec, skip: int | None, ok: bool) -> None:
    model = msgspec.structs.replace(model, takes=("clip_skip", "max_sequence_length"), most_clip_skip=2)
    params = SamplingParams(prompt="", clip_skip=skip)
    if ok:
        assert resolve(params, model, Limits()).params.clip_skip == skip
        return
    with pytest.raises(InvalidRequest, match="clip_skip is 3; this text encoder has 2 layers to leave out"):
        resolve(params, model, Limits())
