"""The oracle: what the model's own diffusers pipeline makes of the same request, computed in another process.

:class:`Oracle` is the tests' side. Run as a script, this file is the other process: it reads one JSON object a line,
calls the pipeline of the folder for each case and writes pixels and latents to a ``.npz``. It imports nothing of
diffgen. One process serves a whole test session, since imports take seconds and a case takes milliseconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Of the oracle and of the ranks it is compared with.
THREADS = 1

#: The fields of a case are arguments of the diffusers pipeline, by its own names, beside these, which become objects:
#: ``n`` outputs from ``seed`` on, ``scheduler`` (a class of diffusers), ``flow_shift`` of flow-matching models, and
#: ``scheduler_options``, settings that the scheduler has beside those of the folder.
Case = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Reference:
    """The oracle's answer: uint8 (n, frames, height, width, 3) and the latents it was decoded from."""

    pixels: NDArray[np.uint8]
    latents: NDArray[np.float32]


class Oracle:
    """A process that runs diffusers pipelines in float32 on the CPU. Answers are kept, so equal cases cost once."""

    def __init__(self, threads: int = THREADS) -> None:
        self._threads = threads
        self._process: subprocess.Popen[str] | None = None
        self._answers: dict[str, Reference] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="oracle-")

    def run(self, model: Path, case: Case) -> Reference:
        return self.run_all(model, [case])[0]

    def run_all(self, model: Path, cases: Sequence[Case]) -> list[Reference]:
        """One answer a case, in order. Raises :class:`RuntimeError` with the other side's traceback."""
        keys = [json.dumps([str(model), case], sort_keys=True) for case in cases]
        missing = {key: case for key, case in zip(keys, cases, strict=True) if key not in self._answers}
        if missing:
            found = self._ask(model, list(missing.values()))
            self._answers |= dict(zip(missing, found, strict=True))
        return [self._answers[key] for key in keys]

    def _ask(self, model: Path, cases: list[Case]) -> list[Reference]:
        import numpy as np

        process = self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        path = Path(self._folder.name) / f"{len(self._answers)}.npz"
        request = {"model": str(model), "threads": self._threads, "cases": cases, "path": str(path)}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the oracle ended with exit code {process.wait()}")
        answer = json.loads(line)
        if answer["error"] is not None:
            raise RuntimeError(f"the oracle failed:\n{answer['error']}")
        with np.load(path) as arrays:
            found = [Reference(arrays[f"pixels{i}"], arrays[f"latents{i}"]) for i in range(len(cases))]
        path.unlink()
        return found

    def start(self) -> subprocess.Popen[str]:
        """Start the process unless it runs; its imports go on while the caller does other work."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        return self._process

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()  # the end of its input ends it
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None
        self._folder.cleanup()

    def __enter__(self) -> Oracle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def level_difference(ours: NDArray[np.uint8], theirs: NDArray[np.uint8]) -> int:
    """The largest difference of any two pixels, in levels of 255."""
    import numpy as np

    assert ours.dtype == theirs.dtype == np.uint8
    assert ours.shape == theirs.shape
    return int(np.abs(ours.astype(np.int16) - theirs).max())


def relative_difference(ours: Any, theirs: Any) -> float:
    """The largest difference of two latents over the largest value: a model's latents may be of any size."""
    import numpy as np

    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.dtype == theirs.dtype == np.float32
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def _serve() -> None:
    """The other process: a request a line, an answer a line, until the input ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what libraries print must not mix with the answers
    pipes: dict[str, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        error = None
        try:
            _answer(request, pipes)
        except Exception:
            # The other side must hear of it in place of an answer.
            error = traceback.format_exc()
        answers.write(json.dumps({"error": error}) + "\n")
        answers.flush()


def _answer(request: dict[str, Any], pipes: dict[str, Any]) -> None:
    import diffusers
    import numpy as np
    import torch

    torch.set_num_threads(request["threads"])
    folder = request["model"]
    if folder not in pipes:
        diffusers.utils.logging.disable_progress_bar()
        index = json.loads((Path(folder) / "model_index.json").read_text())
        # Some pipelines want to be told of these.
        absent = {name: None for name, kind in index.items() if kind == [None, None]}
        pipes[folder] = diffusers.DiffusionPipeline.from_pretrained(
            folder, torch_dtype=torch.float32, use_safetensors=True, local_files_only=True, **absent
        )
        pipes[folder].set_progress_bar_config(disable=True)
    arrays = {}
    for index, case in enumerate(request["cases"]):
        arrays[f"pixels{index}"], arrays[f"latents{index}"] = _call(pipes[folder], case)
    np.savez(request["path"], **arrays)


def _call(pipe: Any, case: dict[str, Any]) -> tuple[Any, Any]:
    """One call of the pipeline as a user of diffusers would write it."""
    options = dict(case)
    count, seed = options.pop("n", 1), options.pop("seed")
    final: dict[str, Any] = {}

    def keep(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        final.update(values)
        return {}

    takes = inspect.signature(pipe.__call__).parameters
    counted = next((name for name in ("num_images_per_prompt", "num_videos_per_prompt") if name in takes), None)
    if counted is not None:
        options[counted] = count
    own = {name: options.pop(name, None) for name in ("scheduler", "flow_shift", "scheduler_options")}
    unknown = set(options) - set(takes)
    assert not unknown, f"{type(pipe).__name__} takes no {sorted(unknown)}"
    assert counted is not None or count == 1, f"{type(pipe).__name__} makes one output a call"

    encoder = getattr(pipe, "text_encoder", None)
    if options.get("clip_skip") is not None and not hasattr(encoder, "text_model"):
        # diffusers looks for the last norm where transformers 4 had it.
        vars(encoder)["text_model"] = encoder

    def call(**more: Any) -> Any:
        with _scheduler(pipe, own["scheduler"], own["flow_shift"], own["scheduler_options"] or {}):
            output = pipe(**options, generator=_generators(seed, count), **more)
        return output.frames if hasattr(output, "frames") else output.images

    if "callback_on_step_end" in takes:
        pixels = call(output_type="np", callback_on_step_end=keep)
    else:
        pixels, final["latents"] = call(output_type="np"), call(output_type="latent")
    # As diffusers' numpy_to_pil; "np" is already clamped to [0, 1]. Images are (n, height, width, 3).
    pixels = (pixels * 255).round().astype("uint8")
    return pixels if pixels.ndim == 5 else pixels[:, None], final["latents"].float().numpy().copy()


def _generators(seed: int, count: int) -> list[Any]:
    import torch

    return [torch.Generator("cpu").manual_seed(seed + index) for index in range(count)]


@contextlib.contextmanager
def _scheduler(pipe: Any, name: str | None, flow_shift: float | None, options: dict[str, Any]) -> Any:
    """The pipeline with another scheduler for one call, as diffusers' pages on its family set it."""
    import diffusers

    own = pipe.scheduler
    matches_flow = "shift" in own.config or own.config.get("prediction_type") == "flow_prediction"
    # A new one each call: a scheduler keeps state, and diffusers itself would reuse it.
    if not matches_flow and flow_shift is None:
        kind = type(own) if name is None else getattr(diffusers, name)
        pipe.scheduler = kind.from_config(own.config, **options)
    elif name == "FlowMatchEulerDiscreteScheduler":
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=flow_shift, **options)
    elif name is not None:
        flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "num_train_timesteps": 1000}
        pipe.scheduler = getattr(diffusers, name)(**flow, flow_shift=flow_shift, **options)
    else:
        setting = "shift" if "shift" in own.config else "flow_shift"
        shift = {} if flow_shift is None else {setting: flow_shift}
        pipe.scheduler = own.from_config(own.config, **shift, **options)
    try:
        yield
    finally:
        pipe.scheduler = own


if __name__ == "__main__":
    _serve()
