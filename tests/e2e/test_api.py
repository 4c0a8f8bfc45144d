"""The Python API against real processes."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import level_difference
from PIL import Image
from processes import DIFFGEN, leftovers, rank_processes, run_root, wait_until

from diffgen import DiffGenerator, SamplingParams
from diffgen.errors import (
    ConnectionFailed,
    InvalidRequest,
    ModelError,
    OutOfMemory,
    OutputError,
    QueueFull,
    RequestCancelled,
    ServerClosed,
)
from diffgen.params import Limits
from diffgen.wire.messages import Accepted, Progress

FAST: dict[str, Any] = {"num_inference_steps": 2, "width": 64, "height": 64, "num_frames": 1}
LONG: dict[str, Any] = {**FAST, "num_inference_steps": 900}


@pytest.fixture(scope="module")
def server(tiny_wan: Path) -> Iterator[DiffGenerator]:
    """One rank that also listens on TCP, with a short queue."""
    with DiffGenerator.from_pretrained(
        str(tiny_wan), device="cpu", address="tcp://127.0.0.1:*", token="open sesame", limits=Limits(queue=6)
    ) as generator:
        yield generator


def test_one_prompt(server: DiffGenerator) -> None:
    result = server.generate("a red circle", seed=5, **FAST)
    assert isinstance(result.images[0], Image.Image)
    assert result.images[0].size == (64, 64)
    assert result.seed == 5
    assert result.params.guidance_scale == server.model.defaults["guidance_scale"]
    assert set(result.timings) == {"queue", "encode", "timesteps", "latents", "denoise", "decode", "total"}
    assert result.timings["total"] >= result.timings["denoise"] > 0
    assert result.peak_memory_mb > 50
    assert result.paths == []


def test_a_drawn_seed_makes_the_same_pixels_again(server: DiffGenerator) -> None:
    first = server.generate("a", **FAST)
    again = server.generate("a", seed=first.seed, **FAST)
    other = server.generate("a", **FAST)
    assert np.array_equal(first.pixels, again.pixels)
    assert other.seed != first.seed


def test_resolved_parameters_repeat_the_run(server: DiffGenerator) -> None:
    first = server.generate("a", **FAST)
    values = {name: getattr(first.params, name) for name in SamplingParams.__struct_fields__}
    again = server.generate(**{name: value for name, value in values.items() if value is not None})
    assert np.array_equal(first.pixels, again.pixels)


def test_list_keeps_order_and_carries_errors(server: DiffGenerator) -> None:
    with pytest.raises(InvalidRequest, match="NUL"):
        server.generate(["a", "b\0"], seed=1, **FAST)
    results = server.generate(["a", "x" * 30_000, "b"], seed=1, **FAST)
    assert [result.error is None for result in results] == [True, False, True]
    assert isinstance(results[1].error, InvalidRequest)
    assert results[1].error.code == "prompt_too_long"
    with pytest.raises(InvalidRequest):
        _ = results[1].images
    assert level_difference(results[2].pixels, server.generate("b", seed=1, **FAST).pixels) <= 1
    with pytest.raises(InvalidRequest):
        server.generate(["a", "x" * 30_000], seed=1, raise_errors=True, **FAST)
    kept = server.generate("x" * 30_000, raise_errors=False, **FAST)
    assert kept.error is not None


def test_output_types(server: DiffGenerator) -> None:
    still = {kind: server.generate("a", seed=1, n=2, output_type=kind, **FAST) for kind in ("pil", "np", "pt")}
    assert [np.asarray(image).shape for image in still["pil"].images] == [(64, 64, 3)] * 2
    assert still["np"].images.shape == (2, 64, 64, 3)
    assert still["np"].images.dtype == np.float32
    assert still["pt"].images.shape == (2, 3, 64, 64)
    assert np.array_equal(np.asarray(still["pil"].images[1]), (still["np"].images[1] * 255).round().astype(np.uint8))
    clip = server.generate("a", seed=1, output_type="np", **{**FAST, "num_frames": 5})
    assert clip.frames.shape == (1, 5, 64, 64, 3)
    with pytest.raises(AttributeError, match="frames"):
        _ = clip.images
    latent = server.generate("a", seed=1, output_type="latent", **FAST)
    assert latent.latents.dtype == torch.float32
    assert latent.latents.shape[0] == 1
    assert "decode" not in latent.timings
    with pytest.raises(AttributeError, match="latents"):
        _ = latent.images


def test_events_tell_every_step_in_order(server: DiffGenerator) -> None:
    handle = server.submit("a", seed=1, **{**FAST, "num_inference_steps": 4, "num_frames": 9})
    events = list(handle.events())
    assert isinstance(events[0], Accepted)
    steps = [(event.stage, event.step, event.total) for event in events if isinstance(event, Progress)]
    assert [step for step in steps if step[0] == "denoise"] == [("denoise", k, 4) for k in (1, 2, 3, 4)]
    assert [step for step in steps if step[0] == "decode"] == [("decode", k, 3) for k in (1, 2, 3)]
    assert events[-1] is handle.result()
    assert list(handle.events()) == events, "a second reader sees the same"


def test_callback_runs_here_and_its_error_cancels(server: DiffGenerator) -> None:
    seen: list[tuple[str, int]] = []
    threads = set()

    def callback(progress: Progress) -> None:
        threads.add(threading.current_thread())
        seen.append((progress.stage, progress.step))
        if progress.stage == "denoise" and progress.step == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        server.generate("a", seed=1, callback=callback, **LONG)
    assert threads == {threading.current_thread()}
    assert ("denoise", 3) in seen
    server.generate("a", **FAST)  # would come after 900 steps, had the first gone on


def test_cancel_ends_within_a_unit(server: DiffGenerator) -> None:
    handle = server.submit("a", seed=1, **LONG)
    for event in handle.events():
        if isinstance(event, Progress) and event.stage == "denoise":
            handle.cancel()
            handle.cancel()
            break
    with pytest.raises(RequestCancelled) as caught:
        handle.result(timeout=30)
    assert caught.value.code == "request_cancelled"
    assert handle.done()
    handle.cancel()
    last = [event.step for event in handle.events() if isinstance(event, Progress)][-1]
    assert last < 450, "far from the 900 asked for, also where this process gets little of the machine"


def test_cancel_while_decoding_and_after_the_end(server: DiffGenerator) -> None:
    handle = server.submit("a", seed=1, **{**FAST, "num_inference_steps": 1, "num_frames": 257})
    next(event for event in handle.events() if isinstance(event, Progress) and event.stage == "decode")
    handle.cancel()
    with pytest.raises(RequestCancelled):
        handle.result(timeout=30)
    last = [event for event in handle.events() if isinstance(event, Progress)][-1]
    assert last.step < last.total == 65
    done = server.submit("a", seed=1, **FAST)
    pixels = done.result(timeout=60).pixels
    done.cancel()
    assert np.array_equal(server.generate("a", seed=1, **FAST).pixels, pixels)
    assert done.result() is done.result()
    assert not server.status().requests


def test_result_times_out_and_the_request_goes_on(server: DiffGenerator) -> None:
    handle = server.submit("a", seed=1, **{**FAST, "num_inference_steps": 60})
    with pytest.raises(TimeoutError):
        handle.result(timeout=0.01)
    assert handle.result(timeout=60).seed == 1
    with pytest.raises(TimeoutError, match="cancelled"):
        server.generate("a", timeout=0.5, **LONG)
    server.generate("a", **FAST)


def test_short_request_overtakes_a_long_one(server: DiffGenerator) -> None:
    long = server.submit("a", seed=1, **LONG)
    short = server.submit("b", seed=1, **FAST)
    assert short.result(timeout=60).seed == 1
    assert not long.done()
    long.cancel()


def test_queue_full_is_said_at_once(server: DiffGenerator) -> None:
    handles = [server.submit("a", seed=1, **LONG) for _ in range(8)]
    refused = [handle for handle in handles if handle.done() or _refused(handle)]
    for handle in handles:
        handle.cancel()
    assert len(refused) == 2
    with pytest.raises(QueueFull, match="limit is 6") as caught:
        refused[0].result()
    assert caught.value.retryable
    assert caught.value.retry_after is not None
    assert caught.value.retry_after > 0
    for handle in handles:
        wait_until(handle.done, 30, "every request is answered")


def test_a_list_longer_than_the_queue_is_answered_whole(server: DiffGenerator) -> None:
    results = server.generate(["a"] * 9, seed=1, **FAST)
    assert [result.error for result in results] == [None] * 9


def test_of_a_list_that_is_cut_short_what_has_ended_is_saved(server: DiffGenerator, tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        if list(tmp_path.iterdir()):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        server.generate(["first", *["a"] * 50], seed=1, output_path=str(tmp_path), callback=stop, **FAST)
    assert (tmp_path / "first_1_00.png").exists()
    wait_until(lambda: not server.status().requests, 30, "the others are cancelled")


@pytest.mark.parametrize("prompt", [5, b"a", {"prompt": "a"}])
def test_what_is_no_text_and_no_list_is_refused(server: DiffGenerator, prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt is .*; it must be a text"):
        server.generate(prompt, **FAST)


@pytest.mark.parametrize("wrong", [{"prompt": "\ud800"}, {"prompt": object()}, {"prompt": "a", "seed": 2**70}])
def test_parameters_made_by_hand_are_checked_before_they_are_sent(server: DiffGenerator, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        server.submit(SamplingParams(**wrong))
    assert server.submit(SamplingParams(prompt="a", seed=1, **FAST)).result(60).seed == 1


def test_whole_parameters_stand_in_place_of_a_prompt(server: DiffGenerator) -> None:
    asked = [SamplingParams(prompt="a", seed=seed, **FAST) for seed in (1, 2)]
    assert [result.seed for result in server.generate(asked, timeout=math.inf)] == [1, 2]
    assert asyncio.run(server.agenerate(asked[0])).seed == server.generate(asked[0]).seed == 1
    with pytest.raises(InvalidRequest, match="seed beside SamplingParams"):
        server.generate(asked, seed=3)


def test_previews_that_nobody_would_see_are_refused(server: DiffGenerator) -> None:
    with pytest.raises(InvalidRequest, match=r"preview_every 2 has no effect .*submit"):
        server.generate("a", preview_every=2, **FAST)
    with pytest.raises(InvalidRequest, match="preview_every 2"):
        asyncio.run(server.agenerate("a", preview_every=2, **FAST))
    assert server.generate("a", preview_every=0, seed=1, **FAST).seed == 1


def _refused(handle: Any) -> bool:
    return not isinstance(next(handle.events()), Accepted)


def test_async(server: DiffGenerator) -> None:
    async def main() -> None:
        one, two = await asyncio.gather(server.agenerate("a", seed=1, **FAST), server.agenerate("b", seed=2, **FAST))
        assert (one.seed, two.seed) == (1, 2)
        handle = server.submit("a", seed=3, **FAST)
        kinds = [type(event).__name__ async for event in handle.aevents()]
        assert kinds[0] == "Accepted"
        assert kinds[-1] == "GenerationResult"
        assert (await handle).seed == 3
        task = asyncio.create_task(server.agenerate("a", **LONG))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await server.agenerate("a", seed=4, **FAST)).seed == 4

    asyncio.run(main())


def test_many_threads_get_their_own_results(server: DiffGenerator) -> None:
    def draw(seed: int) -> Any:
        return server.generate("a", seed=seed, **{**FAST, "num_inference_steps": seed}).pixels

    alone = {seed: draw(seed) for seed in (2, 3, 4)}
    found: dict[int, Any] = {}

    def work(seed: int) -> None:
        found[seed] = draw(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, pixels in alone.items():
        assert level_difference(found[seed], pixels) <= 1


@pytest.mark.parametrize(
    ("sampling", "match"),
    [
        ({"width": 100}, "96 or 112"),
        ({"size": "64X64"}, "WIDTHxHEIGHT"),
        ({"size": "64x64", "width": 128, "height": 64}, "differ"),
        ({"num_frames": 4}, "1 or 5"),
        ({"num_inference_steps": 10**9}, "limit of 1000"),
        ({"width": 100_000, "height": 100_000}, "limit of"),
        ({"n": 17}, "limit of 16"),
        ({"scheduler": "nope"}, "euler"),
        ({"guidance_scale_2": 2.0}, "takes no guidance_scale_2"),
        ({"max_sequence_length": 1000}, "at most 512"),
    ],
)
def test_refused_by_the_model_or_the_limits(server: DiffGenerator, sampling: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidRequest, match=match) as caught:
        server.generate("a", **sampling)
    assert not caught.value.retryable


CHANGED: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": "b"},
    "negative_prompt": {"negative_prompt": "b"},
    "size": {"size": "96x64", "width": None, "height": None},
    "width": {"width": 96},
    "height": {"height": 96},
    "num_frames": {"num_frames": 5},
    "seconds": {"seconds": 0.5},
    "fps": {"fps": 9},
    "num_inference_steps": {"num_inference_steps": 3},
    "guidance_scale": {"guidance_scale": 2.0},
    "guidance_scale_2": {"guidance_scale_2": 2.0},
    "true_cfg_scale": {"true_cfg_scale": 2.0},
    "seed": {"seed": 2},
    "num_outputs_per_prompt": {"num_outputs_per_prompt": 2},
    "scheduler": {"scheduler": "unipc"},
    "flow_shift": {"flow_shift": 9.0},
    "max_sequence_length": {"max_sequence_length": 3},
    "clip_skip": {"clip_skip": 1},
    "time_limit": {"time_limit": 1e-6},
    "output_type": {"output_type": "latent"},
}


@pytest.mark.parametrize(
    "name", [name for name in SamplingParams.__struct_fields__ if name not in ("priority", "preview_every")]
)
def test_no_parameter_is_ignored_without_a_word(server: DiffGenerator, name: str) -> None:
    """Another value changes the result, or is refused, or is told to have no effect."""
    base: dict[str, Any] = {"prompt": "a red circle on a blue square", "seed": 1, **FAST}
    plain = server.generate(**base)
    changed = server.generate(**{**base, **CHANGED[name]}, raise_errors=False)
    if changed.error is not None:
        assert changed.error.code in ("unsupported_parameter", "deadline_impossible")
        return
    assert changed.raw is not None
    assert not np.array_equal(changed.raw, plain.raw) or any(name in warning for warning in changed.warnings)


def test_what_cannot_fit_into_memory_is_refused_with_the_numbers(server: DiffGenerator) -> None:
    with pytest.raises(OutOfMemory, match=r"needs about \d+ MiB a rank, and \d+ are free") as caught:
        server.generate("a", width=4096, height=4096, num_frames=1025, n=16)
    assert caught.value.code == "insufficient_memory"


def test_warnings_say_what_has_no_effect(server: DiffGenerator) -> None:
    result = server.generate("a", seed=1, negative_prompt="b", guidance_scale=1.0, fps=12, **FAST)
    assert any("negative_prompt has no effect" in warning for warning in result.warnings)
    assert any("fps" in warning for warning in result.warnings)
    plain = server.generate("a", seed=1, guidance_scale=1.0, **FAST)
    assert np.array_equal(result.pixels, plain.pixels)
    cut = server.generate("red " * 100, seed=1, max_sequence_length=16, **FAST)
    assert any("cut off" in warning for warning in cut.warnings)
    seconds = server.generate("a", seed=1, seconds=1.0, fps=8, **{**FAST, "num_frames": None})
    assert seconds.params.num_frames == 9
    assert any("makes 9" in warning for warning in seconds.warnings)


def test_saving(server: DiffGenerator, tmp_path: Path) -> None:
    first = server.generate("../a red/circle", seed=1, n=2, output_path=str(tmp_path), **FAST)
    again = server.generate("../a red/circle", seed=1, n=2, output_path=str(tmp_path), **FAST)
    assert len({*first.paths, *again.paths}) == 4
    assert all(path.parent == tmp_path for path in first.paths)
    assert np.array_equal(np.asarray(Image.open(first.paths[1])), first.pixels[1, 0])
    named = server.generate("a", output_path=str(tmp_path), output_file_name="x", **{**FAST, "num_frames": 5})
    assert named.paths == [tmp_path / "x.mp4"]
    with pytest.raises(OutputError, match="plain file name"):
        server.generate("a", output_path=str(tmp_path), output_file_name="../x", **FAST)
    with pytest.raises(OutputError, match="/proc"):
        server.generate("a", output_path="/proc/nope", **FAST)


CLIENT = """
import json, sys
from diffgen import DiffGenerator
token = sys.argv[2] if len(sys.argv) > 2 else None
with DiffGenerator.connect(sys.argv[1], token=token) as generator:
    result = generator.generate("a", seed=1, num_inference_steps=2, width=64, height=64, num_frames=1)
    print(json.dumps([result.pixels.sum().item(), generator.model.family]))
"""


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_connect_from_another_process(server: DiffGenerator, transport: str) -> None:
    private = server.ranks()[0]
    assert private.ready is not None
    address = server._connection.address if transport == "ipc" else server.address
    assert address.startswith(f"{transport}://")
    token = [] if transport == "ipc" else ["open sesame"]
    run = subprocess.run(
        [sys.executable, "-c", CLIENT, address, *token], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    expected = int(server.generate("a", seed=1, **FAST).pixels.sum())
    assert json.loads(run.stdout) == [expected, "wan"]


def test_connect_with_a_wrong_token_or_to_nothing(server: DiffGenerator, tmp_path: Path) -> None:
    with pytest.raises(ConnectionFailed, match="token") as caught:
        DiffGenerator.connect(server.address, token="wrong", timeout=10)
    assert caught.value.code == "unauthorized"
    with pytest.raises(ConnectionFailed):
        DiffGenerator.connect(f"ipc://{tmp_path}/none", timeout=0.5)
    with pytest.raises(ConnectionFailed, match="tcp://"):
        DiffGenerator.connect("nonsense", timeout=0.5)
    with pytest.raises(InvalidRequest, match="address is None"):
        DiffGenerator.connect(None)  # type: ignore[arg-type]


def test_a_client_that_leaves_takes_its_requests_along(server: DiffGenerator) -> None:
    client = DiffGenerator.connect(server._connection.address)
    handle = client.submit("a", **LONG)
    next(handle.events())
    client.close()
    with pytest.raises(ServerClosed):
        handle.result(timeout=5)
    server.generate("a", **FAST)
    with pytest.raises(ServerClosed):
        client.submit("a")


def test_status_and_abort_see_every_client(server: DiffGenerator) -> None:
    before = server.status()
    assert before.requests == ()
    handle = server.submit("a", seed=1, n=2, **LONG)
    for event in handle.events():
        if isinstance(event, Progress) and event.stage == "denoise":
            break
    with DiffGenerator.connect(server._connection.address) as other:
        (request,) = other.status().requests
        assert (request.id, request.state, request.stage, request.total) == (handle.id, "running", "denoise", 900)
        assert (request.width, request.height, request.num_frames, request.outputs) == (64, 64, 1, 2)
        assert 0 < request.step < 900
        for nobody in ("nothing of that name", "", "x" * 65, "\ud800"):
            assert not other.abort(nobody)
        assert other.abort(handle.id)
    with pytest.raises(RequestCancelled, match="another client"):
        handle.result(timeout=10)
    after = server.status()
    assert after.requests == ()
    assert after.ticks > before.ticks
    assert after.finished["request_cancelled"] == before.finished.get("request_cancelled", 0) + 1


def test_wrong_arguments_fail_before_any_process(tmp_path: Path) -> None:
    with run_root() as root:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"num_gpu": 2}, "num_gpus"),
            ({"num_gpus": 0}, "at least 1"),
            ({"dtype": "int8"}, "float32"),
            ({"address": "tcp://127.0.0.1:1"}, "token"),
            ({"limits": {"queue": 4}}, "Limits"),
            ({"limits": Limits(queue="4")}, "queue is '4'; it must be a whole number"),  # type: ignore[arg-type]
        ]
        for options, match in cases:
            with pytest.raises(InvalidRequest, match=match):
                DiffGenerator.from_pretrained(**options)
        folders: list[tuple[str | Path, str]] = [("./nope", "no such directory"), (tmp_path, "model_index.json")]
        for path, match in folders:
            with pytest.raises(ModelError, match=match):
                DiffGenerator.from_pretrained(path)
        assert leftovers(root) == []


@pytest.mark.slow
def test_a_generator_that_nobody_has_any_more_is_closed(tiny_wan: Path, root: Path) -> None:
    handle = DiffGenerator.from_pretrained(tiny_wan, device="cpu").submit("a", seed=1, **FAST)
    assert handle.result(120).seed == 1, "its handle keeps it"
    assert rank_processes(root)
    del handle
    wait_until(lambda: not leftovers(root), 30, "it has ended")


def test_nan_is_an_error_that_names_the_stage(tiny_wan: Path, tmp_path: Path) -> None:
    """A weight that is infinite gives no black picture."""
    import shutil

    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(tiny_wan, broken)
    weights = broken / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors["proj_out.weight"][0, 0] = float("inf")
    save_file(tensors, weights, metadata={"format": "pt"})
    run = subprocess.run(
        [*DIFFGEN, "generate", "--prompt", "a", "--model-path", str(broken), "--output-path", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 1
    assert "not finite" in run.stderr
    assert "denoise" in run.stderr
    assert list((tmp_path / "out").iterdir()) == []
