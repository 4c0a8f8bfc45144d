"""``diffgen bulk``: many requests from a file, resumable.

Beside the results stands the manifest. Its first line is the run: the file's digest, the model, and the seed from which
every request without one gets its own. Each further line is one request's end. A request's files have names of its own,
and its seed is fixed before it runs, so what a crash left half done is done again into the same files, and nothing else
is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import queue
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from diffgen.api import DiffGenerator
from diffgen.cli.config import unique
from diffgen.cli.connect import open_generator
from diffgen.cli.flags import given
from diffgen.cli.manifest import Entry, Manifest, Run
from diffgen.cli.options import BulkOptions
from diffgen.cli.settings import read_server
from diffgen.errors import (
    DeadlineExceeded,
    DiffgenError,
    InvalidRequest,
    OutputError,
    QueueFull,
    ServerError,
    WorkerDied,
)
from diffgen.fields import build
from diffgen.handle import Event, GenerationHandle, is_final
from diffgen.media.files import check_folder, is_temporary
from diffgen.media.save import SaveOptions, save_result
from diffgen.params import SamplingParams, parse_params

_WINDOW = 16  # requests at the server at a time: enough to fill its batches while others decode
_RETRY_S, _LONGEST_RETRY_S = 1.0, 10.0
_TOLD = 10  # wrong lines
_FORM = 'give a JSON object of parameters a line, such as {"prompt": "a cat", "seed": 1}'
_OF_CALLERS = {"output_type", "preview_every"}


def run(arguments: argparse.Namespace) -> int:
    """Run what the manifest does not hold yet; print a manifest line an end. Returns the exit code.

    Raises :class:`InvalidRequest` for a line that cannot be a request, before anything is loaded or begun.
    """
    options = build(BulkOptions, given(arguments, BulkOptions))
    server = read_server(arguments)
    text = _read(arguments.requests)
    folder = check_folder(Path(options.output_path))
    with Manifest(folder) as manifest:
        digest = hashlib.sha256(text.encode()).hexdigest()
        seed = _seed_of(manifest.run, digest)
        requests = _parse(text, seed)
        if not requests:
            raise InvalidRequest(f"{arguments.requests!r} holds no request; {_FORM}")
        skipped = {line for line, entry in manifest.ended.items() if entry.status == "done" or not options.retry_failed}
        _remove_unfinished(folder)
        todo = [(line, params) for line, params in requests if line not in skipped]
        if not options.quiet:
            print(f"{len(skipped)} of {len(requests)} requests are in the manifest", file=sys.stderr)
        if todo:
            window = min(_WINDOW, server.limits.queue)
            with open_generator(server, options.quiet) as generator, _bar(len(todo), options.quiet) as bar:
                model = generator.model.name
                _begin(manifest, Run(requests=arguments.requests, sha256=digest, seed=seed, model=model))
                for entry in _work(generator, todo, folder, window):
                    manifest.note(entry)
                    with bar.external_write_mode():  # or the line would begin where the bar ends
                        print(msgspec.json.encode(entry).decode(), flush=True)
                    bar.update(1)
        failed = sum(entry.status == "failed" for entry in manifest.ended.values())
    if failed:
        remedy = "their lines say why, and retry_failed runs them again"
        print(f"diffgen: error: {failed} of {len(requests)} requests have failed; {remedy}", file=sys.stderr)
    return int(failed > 0)


def _read(name: str) -> str:
    """The text of a file, or of stdin for "-". Raises :class:`InvalidRequest`."""
    is_stdin = name == "-"
    try:
        with open(0 if is_stdin else name, "rb", closefd=not is_stdin) as file:
            return file.read().decode("utf-8-sig")
    except (OSError, ValueError) as error:  # a ValueError where it is no UTF-8
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequest(f"cannot read {name!r}: {reason}; give a UTF-8 file of JSON lines") from None


def _seed_of(begun: Run | None, digest: str) -> int:
    """The seed of the run that a manifest has, or a new one. Raises :class:`InvalidRequest` for another file's."""
    if begun is None:
        return secrets.randbelow(2**32)
    if begun.sha256 != digest:
        remedy = "choose another output_path for other requests"
        raise InvalidRequest(f"the manifest in this folder is of {begun.requests!r} with other content; {remedy}")
    return begun.seed


def _begin(manifest: Manifest, run: Run) -> None:
    """Raises :class:`InvalidRequest` where it was begun with another model."""
    if manifest.run is None:
        manifest.begin(run)
    elif manifest.run.model != run.model:
        remedy = f"give {manifest.run.model!r}, or choose another output_path"
        rule = f"the manifest in this folder is of the model {manifest.run.model!r}, and this is {run.model!r}"
        raise InvalidRequest(f"{rule}; {remedy}")


def _parse(text: str, run_seed: int) -> list[tuple[int, SamplingParams]]:
    """Line numbers and parameters, all with a seed. Raises :class:`InvalidRequest`, once it has told the first lines
    that are no requests."""
    found: list[tuple[int, SamplingParams]] = []
    wrong: list[DiffgenError] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            found.append((number, _parse_line(line, f"{run_seed}:{number}")))
        except InvalidRequest as error:
            wrong.append(error.prefixed(f"line {number}"))
    if len(wrong) > 1:
        for each in wrong[:_TOLD]:
            print(f"diffgen: error: {each}", file=sys.stderr)
        raise InvalidRequest(f"{len(wrong)} of {len(found) + len(wrong)} lines cannot be requests; mend them")
    if wrong:
        raise wrong[0]
    return found


def _parse_line(line: str, seed: str) -> SamplingParams:
    """``seed`` is what its own follows from, where it has none."""
    try:
        values = json.loads(line, object_pairs_hook=unique)
    except InvalidRequest:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"it is not JSON: {error}; {_FORM}") from None
    if not isinstance(values, dict):
        raise InvalidRequest(f"{line[:60]!r} is not a JSON object; {_FORM}")
    misplaced = " and ".join(sorted(_OF_CALLERS & values.keys()))
    if misplaced:
        raise InvalidRequest(f"{misplaced} in a file of requests: all that it gives is files; leave it out")
    if values.get("priority") is None:
        values["priority"] = "batch"
    if values.get("seed") is None:
        values["seed"] = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:6], "big")
    return parse_params(values)


def _stem(line: int, params: SamplingParams) -> str:
    return f"{line:06d}_{params.seed}"


def _remove_unfinished(folder: Path) -> None:
    """Temporary files of a run that was killed; the manifest's lock says that no other writes here."""
    for path in folder.glob(".[0-9][0-9][0-9][0-9][0-9][0-9]*_*"):
        if is_temporary(path.name):
            path.unlink(missing_ok=True)


def _work(
    generator: DiffGenerator, todo: list[tuple[int, SamplingParams]], folder: Path, window: int
) -> Iterator[Entry]:
    """Run requests, ``window`` of them at a time, and yield their ends as they come.

    Raises what is no request's end, as when the server itself is gone: what is not in the manifest then runs another
    time.
    """
    waiting = list(reversed(todo))
    running: dict[str, tuple[int, SamplingParams, GenerationHandle]] = {}
    events: queue.SimpleQueue[tuple[str, Event]] = queue.SimpleQueue()
    try:
        while waiting or running:
            while waiting and len(running) < window:
                line, params = waiting.pop()
                handle = generator.submit(params)
                running[handle.id] = (line, params, handle)
                handle.subscribe(lambda event, request_id=handle.id: events.put((request_id, event)))  # type: ignore[misc]
            request_id, event = events.get()
            if not is_final(event):
                continue
            line, params, handle = running.pop(request_id)
            try:
                yield _finish(line, params, handle, folder)
            except (QueueFull, DeadlineExceeded) as busy:
                # Others are in the way, maybe of this file: the request keeps its turn and waits for room.
                waiting.append((line, params))
                time.sleep(min(busy.retry_after or _RETRY_S, _LONGEST_RETRY_S))
    finally:
        for _, _, handle in running.values():
            handle.cancel()


def _finish(line: int, params: SamplingParams, handle: GenerationHandle, folder: Path) -> Entry:
    """Save one result. An error of the request is its end; raises those of the server, the disk and the moment."""
    options = SaveOptions(output_path=str(folder), output_file_name=_stem(line, params), overwrite=True)
    try:
        result = handle.result()
        names = tuple(path.name for path in save_result(result, options))
    except DiffgenError as error:
        # A request that the server has died of twice is refused, and the server lives.
        its_own = isinstance(error, WorkerDied) or not isinstance(error, ServerError | OutputError)
        if error.retryable or not its_own:
            raise
        return Entry(line=line, status="failed", seed=params.seed, code=error.code, message=error.message)
    seconds = round(result.timings["total"], 3)
    return Entry(
        line=line, status="done", seed=result.seed, paths=names, warnings=tuple(result.warnings), seconds=seconds
    )


def _bar(total: int, quiet: bool) -> Any:
    from tqdm import tqdm

    shown = not quiet and sys.stderr.isatty()
    return tqdm(total=total, desc="bulk", unit="request", file=sys.stderr, disable=not shown, dynamic_ncols=True)
