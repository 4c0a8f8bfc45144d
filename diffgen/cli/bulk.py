"""``diffgen bulk``: many requests from a file, resumable.

Beside the results stands ``manifest.jsonl``. Its first line is the run: the file's digest and the seed from which every
request without one gets its own. Each further line is one request's end. A request's files have names of its own, and
its seed is fixed before it runs, so what a crash left half done is done again into the same files, and nothing else is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from diffgen.api import DiffGenerator
from diffgen.cli.connect import open_generator
from diffgen.cli.flags import given
from diffgen.cli.options import BulkOptions
from diffgen.cli.settings import read_server
from diffgen.errors import DiffgenError, InvalidRequest, OutputError, QueueFull, ServerError
from diffgen.fields import build
from diffgen.handle import Event, GenerationHandle, is_final
from diffgen.media.files import check_folder
from diffgen.media.save import SaveOptions, save_result
from diffgen.params import SamplingParams, parse_params

MANIFEST = "manifest.jsonl"
_WINDOW = 16  # requests at the server at a time: enough to fill its batches while others decode
_RETRY_S, _LONGEST_RETRY_S = 1.0, 10.0


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One request's end, as it stands in the manifest. ``line`` counts from 1."""

    line: int
    status: str  # done or failed
    seed: int | None = None
    paths: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    seconds: float | None = None
    code: str | None = None
    message: str | None = None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """First line of the manifest."""

    requests: str
    sha256: str
    seed: int


def run(arguments: argparse.Namespace) -> int:
    """Run what the manifest does not hold yet; print a manifest line an end. Returns the exit code.

    Raises :class:`InvalidRequest` for a line that cannot be a request, before anything is loaded.
    """
    options = build(BulkOptions, given(arguments, BulkOptions))
    server = read_server(arguments)
    text = sys.stdin.read() if arguments.requests == "-" else _read(Path(arguments.requests))
    folder = check_folder(Path(options.output_path))
    with _open_manifest(folder) as manifest:
        begun = _begin(manifest, arguments.requests, text)
        requests = list(_parse(text, begun.seed))
        ended = {entry.line: entry for entry in _entries(manifest)}
        skipped = {line for line, entry in ended.items() if entry.status == "done" or not options.retry_failed}
        _remove_unfinished(folder)
        todo = [(line, params) for line, params in requests if line not in skipped]
        failed = sum(ended[line].status == "failed" for line in skipped)
        if not options.quiet:
            print(f"{len(skipped)} of {len(requests)} requests are in the manifest", file=sys.stderr)
        if not todo:
            return int(failed > 0)
        with open_generator(server) as generator, _bar(len(todo), options.quiet) as bar:
            for entry in _work(generator, todo, folder):
                _append(manifest, entry)
                print(msgspec.json.encode(entry).decode(), flush=True)
                failed += entry.status == "failed"
                bar.update(1)
    return int(failed > 0)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {str(path)!r}: {error}; give a UTF-8 file of JSON lines") from None


def _open_manifest(folder: Path) -> IO[str]:
    """Opened to read and append, and locked: two runs in one folder would do everything twice."""
    import fcntl

    file = open(folder / MANIFEST, "a+", encoding="utf-8")  # noqa: SIM115  the caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise OutputError(f"another bulk run is writing to {str(folder)!r}; choose another output_path") from None
    return file


def _begin(manifest: IO[str], name: str, text: str) -> Run:
    """The run of this manifest, which is begun if it is empty. Raises :class:`InvalidRequest` for another file's."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    manifest.seek(0)
    first = manifest.readline()
    if not first.endswith("\n"):
        manifest.truncate(0)
        begun = Run(requests=name, sha256=digest, seed=secrets.randbelow(2**32))
        _append(manifest, begun)
        return begun
    begun = msgspec.json.decode(first, type=Run)
    if begun.sha256 != digest:
        remedy = "choose another output_path for other requests"
        raise InvalidRequest(f"the manifest in this folder is of {begun.requests!r} with other content; {remedy}")
    return begun


def _entries(manifest: IO[str]) -> Iterator[Entry]:
    """The ends noted so far; a last line that a crash cut short is removed."""
    manifest.seek(0)
    manifest.readline()
    while True:
        position = manifest.tell()
        line = manifest.readline()
        if not line.endswith("\n"):
            manifest.truncate(position)
            return
        yield msgspec.json.decode(line, type=Entry)


def _append(manifest: IO[str], entry: msgspec.Struct) -> None:
    manifest.write(msgspec.json.encode(entry).decode() + "\n")
    manifest.flush()
    os.fsync(manifest.fileno())


def _parse(text: str, run_seed: int) -> Iterator[tuple[int, SamplingParams]]:
    """Line numbers and parameters, all with a seed. Raises :class:`InvalidRequest` naming the line."""
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            if not isinstance(values, dict):
                raise InvalidRequest(f"{line[:60]!r} is not a JSON object of parameters")
            if "output_type" in values:
                raise InvalidRequest("output_type has no place in a file of requests: results are saved as files")
            values.setdefault("priority", "batch")
            if values.get("seed") is None:
                values["seed"] = int.from_bytes(hashlib.sha256(f"{run_seed}:{number}".encode()).digest()[:6], "big")
            yield number, parse_params(values)
        except json.JSONDecodeError as error:
            raise InvalidRequest(f"line {number} is not JSON: {error}") from None
        except InvalidRequest as error:
            raise error.prefixed(f"line {number}") from None


def _stem(line: int, params: SamplingParams) -> str:
    return f"{line:06d}_{params.seed}"


def _remove_unfinished(folder: Path) -> None:
    """Temporary files of a run that was killed; the manifest's lock says that no other writes here."""
    for path in folder.glob(".[0-9][0-9][0-9][0-9][0-9][0-9]_*"):
        path.unlink(missing_ok=True)


def _work(generator: DiffGenerator, todo: list[tuple[int, SamplingParams]], folder: Path) -> Iterator[Entry]:
    """Run requests, a window at a time, and yield their ends as they come.

    Raises :class:`ServerError` when the server itself is gone: what is not in the manifest then runs another time.
    """
    waiting = list(reversed(todo))
    running: dict[str, tuple[int, SamplingParams, GenerationHandle]] = {}
    events: queue.SimpleQueue[tuple[str, Event]] = queue.SimpleQueue()
    try:
        while waiting or running:
            while waiting and len(running) < _WINDOW:
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
            except QueueFull as full:
                # Others use the server as well: the request keeps its turn and waits for room.
                waiting.append((line, params))
                time.sleep(min(full.retry_after or _RETRY_S, _LONGEST_RETRY_S))
    finally:
        for _, _, handle in running.values():
            handle.cancel()


def _finish(line: int, params: SamplingParams, handle: GenerationHandle, folder: Path) -> Entry:
    """Save one result. Errors of the request are its end; those of the server or the disk are the run's."""
    try:
        result = handle.result()
    except (QueueFull, ServerError):
        raise
    except DiffgenError as error:
        return Entry(line=line, status="failed", seed=params.seed, code=error.code, message=error.message)
    options = SaveOptions(output_path=str(folder), output_file_name=_stem(line, params), overwrite=True)
    names = tuple(path.name for path in save_result(result, options))
    seconds = round(result.timings["total"], 3)
    return Entry(
        line=line, status="done", seed=result.seed, paths=names, warnings=tuple(result.warnings), seconds=seconds
    )


def _bar(total: int, quiet: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="bulk", unit="request", file=sys.stderr, disable=quiet or not sys.stderr.isatty())
