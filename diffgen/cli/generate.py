"""``diffgen generate``."""

from __future__ import annotations

import argparse
import collections
import json
import queue
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from diffgen.api import DiffGenerator
from diffgen.cli import dry_run
from diffgen.cli.connect import open_generator
from diffgen.cli.progress import ProgressBar
from diffgen.cli.settings import Settings, read_settings
from diffgen.errors import (
    ConnectionFailed,
    DiffgenError,
    InvalidRequest,
    OutputError,
    ProtocolError,
    QueueFull,
    ServerClosed,
)
from diffgen.handle import Event, GenerationHandle, is_final, waitable
from diffgen.media.files import check_folder
from diffgen.media.save import check_save, save_result
from diffgen.params import parse_params
from diffgen.result import GenerationResult
from diffgen.wire.messages import Progress

_WINDOW = 32  # prompts of a file that a server holds at a time
_RETRY_S = 0.5
_HOPELESS = (ServerClosed, ConnectionFailed, ProtocolError, OutputError)  # no other prompt can fare better


def run(arguments: argparse.Namespace) -> int:
    """Generate the outputs of one prompt, or of each of a file, and print a line for each file written."""
    # What can be wrong without a model is found before it is loaded.
    settings = read_settings(arguments)
    one: list[str | None] = [settings.sampling.get("prompt")]
    prompts: Sequence[str | None] = one if settings.prompts is None else settings.prompts
    first = parse_params({**settings.sampling, "prompt": "" if settings.prompts else prompts[0]})
    check_save(settings.save, first)
    if settings.call.dry_run:
        return dry_run.run(settings, prompts)
    check_folder(Path(settings.save.output_path))
    quiet = settings.call.quiet
    with open_generator(settings.server, quiet) as generator, ProgressBar(quiet) as bar:
        check_save(settings.save, first, generator.model)
        source = settings.source
        if source is not None and source.model != generator.model.name and not quiet:
            made = f"{settings.call.from_metadata} was made with the model {source.model or 'unknown'!r}"
            _tell(f"warning: {made}, and this is {generator.model.name!r}: its pixels will differ")
        return _Run(generator, settings, bar).work(prompts)


def _tell(text: str) -> None:
    print(f"diffgen: {text}", file=sys.stderr)


class _Run:
    """Prompts on their way, in order: several at the server, each saved and told when those before it are."""

    def __init__(self, generator: DiffGenerator, settings: Settings, bar: ProgressBar) -> None:
        self._generator, self._settings, self._bar = generator, settings, bar
        timeout = settings.call.timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._written: list[Path] = []

    def work(self, prompts: Sequence[str | None]) -> int:
        """Returns the exit code. Raises the error of a single prompt; tells those of several and goes on."""
        several = self._settings.prompts is not None
        failed = 0
        for number, (prompt, sent) in enumerate(self._sent(prompts), start=1):
            try:
                if isinstance(sent, DiffgenError):
                    raise sent
                self._finish(sent)
            except DiffgenError as error:
                if not several or isinstance(error, _HOPELESS):
                    raise
                failed += 1
                self._bar.close()
                _tell(f"error: prompt {number} ({(prompt or '')[:40]!r}): {error}")
        if failed:
            _tell(f"error: {failed} of {len(prompts)} prompts failed")
        return int(failed > 0)

    def _sent(self, prompts: Sequence[str | None]) -> Iterator[tuple[str | None, GenerationHandle | DiffgenError]]:
        """Each prompt with its handle, or with why it was not sent."""
        window = min(_WINDOW, self._settings.server.limits.queue)
        waiting: collections.deque[tuple[str | None, GenerationHandle | DiffgenError]] = collections.deque()
        for prompt in prompts:
            if len(waiting) >= window:
                yield waiting.popleft()
            try:
                params = parse_params({**self._settings.sampling, "prompt": prompt})
                waiting.append((prompt, self._generator.submit(params)))
            except InvalidRequest as error:
                waiting.append((prompt, error))
        yield from waiting

    def _finish(self, handle: GenerationHandle) -> None:
        call = self._settings.call
        result = self._wait(handle)
        save_result(result, self._settings.save, self._written)
        self._written += result.paths
        self._bar.close()
        if not call.quiet:
            for warning in result.warnings:
                _tell(f"warning: {warning}")
        for path, seed in zip(result.paths, result.seeds, strict=True):
            print(json.dumps(_as_json(result, path, seed), ensure_ascii=False) if call.json else path, flush=True)

    def _wait(self, handle: GenerationHandle) -> GenerationResult:
        """Raises :class:`TimeoutError` or what the request ended with."""
        while True:
            events: queue.SimpleQueue[Event] = queue.SimpleQueue()
            handle.subscribe(events.put)
            while True:
                try:
                    event = events.get(timeout=self._left())
                except queue.Empty:
                    timeout = self._settings.call.timeout
                    raise TimeoutError(f"the work had not ended after {timeout:g} s and was cancelled") from None
                if isinstance(event, Progress):
                    self._bar(event)
                if is_final(event):
                    break
            try:
                return handle.result()
            except QueueFull:
                # Of a file's prompts, others may be done soon; a single one is told at once.
                if self._settings.prompts is None:
                    raise
                time.sleep(_RETRY_S)
                handle = self._generator.submit(handle.params)

    def _left(self) -> float | None:
        return None if self._deadline is None else waitable(max(0.0, self._deadline - time.monotonic()))


def _as_json(result: GenerationResult, path: Path, seed: int) -> dict[str, Any]:
    return {
        "path": str(path),
        "seed": seed,
        "id": result.id,
        "params": {name: value for name, value in msgspec.structs.asdict(result.params).items() if value is not None},
        "warnings": list(result.warnings),
        "timings": {stage: round(seconds, 6) for stage, seconds in result.timings.items()},
        "peak_memory_mb": round(result.peak_memory_mb, 1),
    }
