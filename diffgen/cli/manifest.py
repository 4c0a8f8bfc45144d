"""The manifest of a bulk run: which requests it is of, and how each that has ended did."""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from diffgen.errors import InvalidRequest, OutputError
from diffgen.media.files import ELSEWHERE, reason_of

NAME = "manifest.jsonl"
_BEGINNING = b'{"requests":'  # of every manifest


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """First line of the manifest: the file, its digest, and the name of the model that draws it. Every request without
    a seed gets one that follows from ``seed``."""

    requests: str
    sha256: str
    seed: int
    model: str


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


Line = TypeVar("Line", Run, Entry)


class Manifest:
    """A folder's manifest, locked while it is open: two runs in one folder would do everything twice.

    Attributes:
        run: None while none has been begun.
        ended: the last end of each request, by its line.

    Raises :class:`OutputError` where it cannot be opened or another run has it, :class:`InvalidRequest` for a file of
    that name which is no manifest; that one is left as it is.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self.run: Run | None = None
        self.ended: dict[int, Entry] = {}
        try:
            self._file: io.FileIO = open(self._path, "ab+", buffering=0)  # noqa: SIM115  closed by close
        except OSError as error:
            raise OutputError(f"cannot open {str(self._path)!r}: {reason_of(error)}; {ELSEWHERE}") from None
        try:
            self._lock()
            self._load()
        except BaseException:
            self.close()
            raise

    def begin(self, run: Run) -> None:
        """Raises :class:`OutputError`."""
        self._append(run)
        self.run = run

    def note(self, entry: Entry) -> None:
        """Raises :class:`OutputError`."""
        self._append(entry)
        self.ended[entry.line] = entry

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Manifest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self) -> None:
        import fcntl

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(f"another bulk run is writing to {str(self._path.parent)!r}; {ELSEWHERE}") from None
        except OSError as error:
            raise OutputError(f"cannot lock {str(self._path)!r}: {reason_of(error)}; {ELSEWHERE}") from None

    def _load(self) -> None:
        self._file.seek(0)
        data = self._file.readall()
        whole = data.rfind(b"\n") + 1
        if not data.startswith(_BEGINNING[: len(data)]):
            raise self._foreign()
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            if number == 1:
                self.run = self._decode(line, number, Run)
            else:
                entry = self._decode(line, number, Entry)
                self.ended[entry.line] = entry
        # What a crash has cut short, the first line too, was not told to anybody.
        self._file.truncate(whole)

    def _decode(self, line: bytes, number: int, kind: type[Line]) -> Line:
        try:
            return msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if kind is Run:
                raise self._foreign() from None
            remedy = "remove it, so that its request runs again"
            raise InvalidRequest(f"line {number} of {str(self._path)!r} cannot be read: {error}; {remedy}") from None

    def _foreign(self) -> InvalidRequest:
        return InvalidRequest(f"{str(self._path)!r} is no manifest of a bulk run; {ELSEWHERE}", param="output_path")

    def _append(self, line: msgspec.Struct) -> None:
        data = msgspec.json.encode(line) + b"\n"
        try:
            while data:  # a disk that is nearly full takes a part
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            remedy = "mend that and run it again"
            raise OutputError(f"cannot write to {str(self._path)!r}: {reason_of(error)}; {remedy}") from None
