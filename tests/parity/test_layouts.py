"""Every layout of several ranks against one rank: same weights and requests, float32 and some bfloat16, over shared
memory; some over gloo too.

Each layout is one process group for all of its families, and must also have done what it says: forwards, parameters and
bytes of each rank are those of its formula.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layouts import Launcher, Made, Mix, Rank, Work, parameters, run_mix
from oracle import level_difference, relative_difference
from parity import MAX_LEVELS, MAX_RELATIVE, MIN_MOVE, PICTURE, Case, Local
from tiny_flux import CHANNELS as FLUX_CHANNELS
from tiny_flux import make_tiny_flux
from tiny_hunyuan import make_tiny_hunyuan
from tiny_models import make_tiny_wan, make_tiny_wan22_5b
from tiny_qwen import make_tiny_qwen_image
from tiny_sana import make_tiny_sana
from tiny_sd import make_tiny_sd, make_tiny_sdxl
from tiny_sd3 import make_tiny_sd35

from diffgen.args import RunArgs
from diffgen.distributed.axis import pieces
from diffgen.distributed.dims import ParallelDims, choose_dims
from diffgen.errors import InvalidRequest
from diffgen.loading.index import read_index
from pipelines.registry import FAMILIES, find_family

pytestmark = pytest.mark.slow

# 15 tokens, which no number of ranks here divides.
ODD: dict[str, Any] = PICTURE | {"width": 80, "height": 48, "num_inference_steps": 2}
CFG: dict[str, Any] = {"true_cfg_scale": 3.0, "negative_prompt": "a blurry dark photo of a very small dog"}
UNGUIDED = {"guidance_scale": 1.0, "n": 3, "seed": 3, "prompt": "a dog"}
CLIP = {"num_frames": 5, "width": 64}
WIDE = {"width": 96, "height": 32}
STEPS = {"num_inference_steps": 3}

#: Requests by name: alone, and at different steps in one forward.
MIXES: dict[str, dict[str, Mix]] = {
    "wan": {
        "guided": [(ODD, 0)],
        "3 tokens": [(ODD | {"width": 48, "height": 16}, 0)],
        "mixed clips": [(ODD | CLIP | STEPS, 1), (ODD | CLIP | UNGUIDED, 0)],
    },
    "wan-5b": {"guided clip": [(ODD | {"width": 160, "height": 96, "num_frames": 5}, 0)]},
    # Texts of 7 tokens.
    "flux": {
        "7 text tokens": [(ODD | {"max_sequence_length": 7}, 0)],
        "mixed": [(ODD | CFG | STEPS, 1), (ODD | {"n": 2, "seed": 3}, 0)],
    },
    "qwen-image": {
        "texts of two lengths": [(ODD | CFG, 0)],
        "mixed": [(ODD | CFG | STEPS, 1), (ODD | {"n": 2, "seed": 3}, 0)],
    },
    "hunyuan-video": {
        "guided": [(ODD | CFG, 0)],
        "mixed clips": [(ODD | CLIP | CFG | STEPS, 1), (ODD | CLIP | {"n": 2, "seed": 3, "prompt": "a dog"}, 0)],
    },
    # Its sizes are multiples of 32 pixels.
    "sana": {"mixed": [(ODD | WIDE | STEPS, 1), (ODD | WIDE | UNGUIDED, 0)]},
    "stable-diffusion": {"mixed": [(ODD | STEPS, 1), (ODD | UNGUIDED, 0)]},
    "stable-diffusion-xl": {"guided": [(ODD, 0)]},
    "stable-diffusion-3": {"mixed": [(ODD | STEPS, 1), (ODD | UNGUIDED, 0)]},
}
MODELS: dict[str, Callable[[Path], Path]] = {
    "wan": make_tiny_wan,
    "wan-5b": make_tiny_wan22_5b,
    "flux": make_tiny_flux,
    "qwen-image": make_tiny_qwen_image,
    "hunyuan-video": make_tiny_hunyuan,
    "sana": make_tiny_sana,
    "stable-diffusion": make_tiny_sd,
    "stable-diffusion-xl": make_tiny_sdxl,
    "stable-diffusion-3": make_tiny_sd35,
}
#: Families whose decode every rank computes whole: there are no rules for their VAE.
WHOLE_DECODE = {"sana"}
#: Dims, whether the decode is shared out, families.
LAYOUTS: dict[str, tuple[ParallelDims, bool, tuple[str, ...]]] = {
    "tp 2": (
        ParallelDims(tp=2),
        False,
        ("wan", "wan-5b", "flux", "qwen-image", "hunyuan-video", "stable-diffusion-3"),
    ),
    "ulysses 2": (ParallelDims(ulysses=2), False, ("wan", "wan-5b", "flux", "qwen-image", "hunyuan-video")),
    "ring 2": (ParallelDims(ring=2), False, ("wan", "wan-5b", "flux", "qwen-image", "hunyuan-video")),
    "cfg 2, decode 2": (ParallelDims(cfg=2), True, tuple(MODELS)),
    "tp 2 x cfg 2, decode 4": (ParallelDims(tp=2, cfg=2), True, ("wan", "flux")),
    "ulysses 2 x ring 2": (ParallelDims(ulysses=2, ring=2), False, ("wan", "flux")),
}
PAIRS = [(layout, family) for layout, (_, _, families) in LAYOUTS.items() for family in families]
#: In bfloat16: cross-attention and joint attention, each axis by itself.
HALF: dict[str, Case] = {"wan": ODD, "flux": ODD | CFG}
HALF_PAIRS = [(layout, family) for layout, family in PAIRS if family in HALF and " x " not in layout]


def mean_difference(ours: Any, theirs: Any) -> float:
    """Of two latents, over the mean value."""
    return float(np.abs(ours - theirs).mean() / np.abs(theirs).mean())


@dataclasses.dataclass(frozen=True)
class Half:
    """A request's latents on one rank in bfloat16 and float32, and how far apart batches of 1, 2 and 4 are there."""

    latents: Any
    exact: Any
    batches: float

    @property
    def rounding(self) -> float:
        return mean_difference(self.latents, self.exact)


class Bench:
    """What one rank and each layout make; each is computed once."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self._launcher, self._folder = launcher, folder
        self.alone = functools.cache(self._alone)
        self.half = functools.cache(self._half)
        self.local = functools.cache(self._local)
        self.ranks = functools.cache(self._ranks)

    def model(self, family: str) -> Path:
        folder = self._folder / f"layouts-{family}"
        return folder if folder.exists() else MODELS[family](folder)

    def _local(self, family: str, dtype: str = "float32") -> Local:
        return Local.load(self.model(family), dtype)

    def _alone(self, family: str, mix: str) -> Made:
        return run_mix(self.local(family), MIXES[family][mix])

    def _half(self, family: str) -> Half:
        case, local = HALF[family], self.local(family, "bfloat16")
        one, two, four = (local.pixels({**case, "n": count})[1][:1] for count in (1, 2, 4))
        batches = max(mean_difference(two, one), mean_difference(four, one), mean_difference(four, two))
        return Half(one, self.local(family).pixels(case)[1], batches)

    def memory_of_loading(self, dims: ParallelDims, model: Path) -> list[int]:
        ranks = self._launcher.run(dims, {"wan": Work(model, {})}, parallel_decode=False, look_at_memory=True)
        return [rank["wan"].memory for rank in ranks]

    def _ranks(self, layout: str) -> list[dict[str, Rank]]:
        dims, parallel_decode, families = LAYOUTS[layout]
        work = {family: Work(self.model(family), MIXES[family]) for family in families}
        for family in families:
            if (layout, family) in HALF_PAIRS:
                work[f"{family} bfloat16"] = Work(self.model(family), {"half": [(HALF[family], 0)]}, "bfloat16")
        return self._launcher.run(dims, work, parallel_decode=parallel_decode)

    def over_gloo(self, layout: str, family: str) -> list[dict[str, Rank]]:
        dims, parallel_decode, _ = LAYOUTS[layout]
        work = {family: Work(self.model(family), MIXES[family])}
        return self._launcher.run(dims, work, parallel_decode=parallel_decode, shared_memory=False)


@pytest.fixture(scope="module")
def bench(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    launcher = Launcher(tmp_path_factory.mktemp("layouts"))
    try:
        yield Bench(launcher, model_folder)
    finally:
        launcher.close()


@pytest.mark.parametrize(("layout", "family"), PAIRS)
def test_a_layout_makes_the_pixels_of_one_rank(bench: Bench, layout: str, family: str) -> None:
    for mix in MIXES[family]:
        alone = bench.alone(family, mix)
        for rank in bench.ranks(layout):
            made = rank[family].mixes[mix]
            for pixels, expected in zip(made.pixels, alone.pixels, strict=True):
                assert level_difference(pixels, expected) <= MAX_LEVELS
            for latents, expected in zip(made.latents, alone.latents, strict=True):
                assert relative_difference(latents, expected) <= MAX_RELATIVE


@pytest.mark.parametrize("layout", LAYOUTS)
def test_process_groups_carry_what_shared_memory_does(bench: Bench, layout: str) -> None:
    """The same to the last bit where a sum has two parts, and as many bytes: gloo, as NCCL is on CUDA."""
    shared, grouped = bench.ranks(layout), bench.over_gloo(layout, "wan")
    for rank, other in zip(shared, grouped, strict=True):
        for mix, made in rank["wan"].mixes.items():
            found = other["wan"].mixes[mix]
            for kind in ("pixels", "latents"):
                for ours, theirs in zip(getattr(made, kind), getattr(found, kind), strict=True):
                    assert np.array_equal(ours, theirs)
            assert (made.rows, made.sent, made.sent_decoding) == (found.rows, found.sent, found.sent_decoding)


@pytest.mark.parametrize(("layout", "family"), HALF_PAIRS)
def test_a_layout_in_bfloat16(bench: Bench, layout: str, family: str) -> None:
    """On the mean no further from one rank than two batch sizes are from each other.

    A CPU computes batches of any size to the same bits. What adds in another order, or has matrices of other sizes,
    rounds in other places: it is about as far from float32 as one rank is.
    """
    half, splits_rows_alone = bench.half(family), LAYOUTS[layout][0].cfg == LAYOUTS[layout][0].world
    assert half.rounding > 0
    for latents in half_latents(bench, layout, family):
        found, exact = mean_difference(latents, half.latents), mean_difference(latents, half.exact)
        print(f"{found:.2%} from one rank, {exact:.2%} from float32; {half.batches:.2%} and {half.rounding:.2%} there")
        assert found <= half.batches or (not splits_rows_alone and exact <= 1.2 * half.rounding)


def half_latents(bench: Bench, layout: str, family: str) -> list[Any]:
    """Each rank's in bfloat16."""
    return [rank[f"{family} bfloat16"].mixes["half"].latents[0] for rank in bench.ranks(layout)]


@pytest.mark.parametrize(("layout", "family"), PAIRS)
def test_every_rank_computes_its_share(bench: Bench, layout: str, family: str) -> None:
    """Rows of forwards, and that the others' parts came over the groups of the layout and over no others."""
    dims, parallel_decode, _ = LAYOUTS[layout]
    for mix in MIXES[family]:
        alone, ranks = bench.alone(family, mix), [rank[family].mixes[mix] for rank in bench.ranks(layout)]
        for index, made in enumerate(ranks):
            if dims.cfg == 1 and (dims.sp == 1 or family != "hunyuan-video"):
                assert made.rows == alone.rows  # HunyuanVideo's texts of several lengths share no forward
            used = {name for name, sent in made.sent.items() if sent}
            axes = {name for name in ("tp", "ulysses", "ring", "cfg") if getattr(dims, name) > 1}
            assert used - {"sequence"} <= axes
            assert used >= axes or not made.rows or not _has_tokens(dims, index, family, mix)
            # Two rows are not split over four ranks.
            split = parallel_decode and family not in WHOLE_DECODE and (mix != "3 tokens" or dims.world == 2)
            assert (made.sent_decoding["decode"] > 0) == split
        groups = ranks[:: dims.world // dims.cfg]
        assert sum(sum(made.rows) for made in groups) == sum(alone.rows)
        steps = len(alone.rows)
        assert max(sum(made.rows) for made in groups) <= sum(alone.rows) / dims.cfg + steps


def _has_tokens(dims: ParallelDims, index: int, family: str, mix: str) -> bool:
    return mix != "3 tokens" or index % dims.world < 3


LAYERS, WIDTH, FFN, TEXT = 2, 64, 128, 16  # of the tiny Wan


def test_parameters_of_tensor_parallel_ranks(bench: Bench) -> None:
    """Half of each sliced weight; biases of row-wise layers are on the first rank alone."""
    whole = parameters(bench.local("wan"))
    attention = 3 * (WIDTH * WIDTH + WIDTH) + WIDTH * WIDTH + 2 * WIDTH
    sliced = LAYERS * (2 * attention + WIDTH * FFN + FFN + FFN * WIDTH)
    biases = LAYERS * 3 * WIDTH
    found = [rank["wan"].parameters for rank in bench.ranks("tp 2")]
    assert [each["transformer"] for each in found] == [
        whole["transformer"] - sliced // 2,
        whole["transformer"] - sliced // 2 - biases,
    ]
    # UMT5 with 2 layers of 4 heads of 8, 32 wide, 64 in between, and 32 buckets of positions.
    sliced = 2 * (4 * 32 * 32 + 32 * 4 + 3 * 32 * 64)
    assert [each["text_encoder"] for each in found] == [whole["text_encoder"] - sliced // 2] * 2
    encoders = {"stable-diffusion-3": None, "flux": "text_encoder_2"}  # one has no text encoder that is large
    encoders |= dict.fromkeys(("qwen-image", "hunyuan-video"), "text_encoder")
    for family, encoder in encoders.items():
        whole = parameters(bench.local(family))
        first, second = (rank[family].parameters for rank in bench.ranks("tp 2"))
        assert second["transformer"] < first["transformer"] < 0.85 * whole["transformer"]
        assert encoder is None or first[encoder] == second[encoder] < 0.95 * whole[encoder]
    # Llama with 3 layers of 4 heads of 8, which share 2 heads of keys and values, 32 wide, 64 in between.
    sliced = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    assert first["text_encoder"] == whole["text_encoder"] - sliced // 2


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="there is no /proc")
def test_memory_of_loading_slices(bench: Bench, tmp_path: Path) -> None:
    """While it loads a model of 200 MB or more, a rank of two never holds much more than half of it.

    It may grow by a little less than that half: what its start has freed is used again.
    """
    folder = make_tiny_wan(tmp_path / "large", heads=64, layers=7)
    size = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    assert size > 200e6
    found = bench.memory_of_loading(ParallelDims(tp=2), folder)
    print(f"{size / 1e6:.0f} MB on disk; RssAnon of each rank grew by {[round(own / 1e6) for own in found]} MB at most")
    for own in found:
        assert 0.35 * size < own < 0.6 * size


def test_bytes_of_a_step(bench: Bench) -> None:
    """Two guided steps of Wan on 15 tokens: four bytes a number, two rows, for each rank and axis."""
    rows, tokens, steps, four, outputs = 2, 15, 2, 4, 8 * 4
    mine = pieces(tokens, 2)

    def sent(layout: str, axis: str) -> list[int]:
        return [rank["wan"].mixes["guided"].sent[axis] for rank in bench.ranks(layout)]

    # A sum of each row-wise layer's outputs, and of squares for three norms of tokens and one of texts.
    sums = 3 * tokens * WIDTH + 3 * tokens + TEXT
    assert sent("tp 2", "tp") == [steps * LAYERS * rows * sums * four] * 2
    # Queries, keys and values of half the heads for the other's tokens, and its outputs back.
    assert sent("ulysses 2", "ulysses") == [
        steps * LAYERS * rows * (3 * own + tokens - own) * WIDTH // 2 * four for own in mine
    ]
    assert sent("ring 2", "ring") == [steps * LAYERS * rows * 2 * own * WIDTH * four for own in mine]
    for layout in ("ulysses 2", "ring 2"):
        assert sent(layout, "sequence") == [steps * rows * own * outputs * four for own in mine]
    # The prediction of one row, and a code of eight bytes.
    assert sent("cfg 2, decode 2", "cfg") == [steps * (tokens * outputs * four + 8)] * 2


def test_bytes_of_a_step_of_joint_attention(bench: Bench) -> None:
    """FLUX.1: text and picture are split each by itself, and meet in every layer's attention."""
    steps, layers, four = 2, 4, 4
    text, picture = pieces(7, 2), pieces(15, 2)
    for layout, axis in (("ulysses 2", "ulysses"), ("ring 2", "ring")):
        for index, rank in enumerate(bench.ranks(layout)):
            own = text[index] + picture[index]
            numbers = (3 * own + 22 - own) * WIDTH // 2 if axis == "ulysses" else 2 * own * WIDTH
            sent = rank["flux"].mixes["7 text tokens"].sent
            assert sent[axis] == steps * layers * numbers * four
            assert sent["sequence"] == steps * picture[index] * 4 * FLUX_CHANNELS * four


@pytest.mark.parametrize(
    "family", ["wan", "flux", "qwen-image", "hunyuan-video", "stable-diffusion", "stable-diffusion-3"]
)
def test_what_a_wrong_layout_would_do_moves_the_picture(bench: Bench, family: str) -> None:
    """Branches swapped, a token in the place of another, other guidance: by three levels or more."""
    local = bench.local(family)
    name = local.pipeline.spec.guidance
    case: Case = ODD | (CFG if local.pipeline.spec.guidance_needs_negative else {"negative_prompt": "a dark photo"})
    pixels = local.pixels(case)[0]
    swapped = {"prompt": case["negative_prompt"], "negative_prompt": case["prompt"]}
    for change in (swapped, {name: 5.5}):
        assert level_difference(local.pixels({**case, **change})[0], pixels) >= MIN_MOVE
    hook = local.denoiser.register_forward_hook(_misplace_a_token)
    try:
        assert level_difference(local.pixels(case)[0], pixels) >= MIN_MOVE
    finally:
        hook.remove()


def _misplace_a_token(module: Any, args: Any, output: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    values = output[0].clone()
    if values.dim() == 3:
        values[:, -1] = values[:, 0]
    else:
        values[..., -2:, -2:] = values[..., :2, :2]
    return (values,)


@pytest.mark.parametrize("family", ["stable-diffusion", "stable-diffusion-xl"])
@pytest.mark.parametrize("degree", ["tp_size", "ulysses_degree", "ring_degree"])
def test_the_weights_and_tokens_of_a_unet_stay_whole(bench: Bench, family: str, degree: str) -> None:
    index = read_index(bench.model(family), None, False)
    abilities = find_family(FAMILIES[family]).abilities(index)
    with pytest.raises(InvalidRequest, match=f"{degree} 2: .* takes 1 alone, since its denoiser is a UNet") as caught:
        choose_dims(RunArgs(num_gpus=2, **{degree: 2}), abilities, index.pipeline_class)
    assert (caught.value.param, caught.value.code) == (degree, "unsupported_layout")
