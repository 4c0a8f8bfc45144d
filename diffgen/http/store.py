"""Video jobs and files that clients may fetch, on disk: what a restart must not lose.

A database holds every job from before it runs until a day after its file has gone; files have names of our own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from diffgen.errors import OutputError, StartFailed
from diffgen.media import files
from diffgen.params import SamplingParams

logger = logging.getLogger("diffgen.http.store")

Status = Literal["queued", "in_progress", "completed", "failed"]

_ELSEWHERE = "choose another folder by data_path"
_KNOWN_S = 86400.0  # that an id is remembered after its file has gone
_PLACES = 1000  # deleted jobs whose places are remembered
_RESERVE_BYTES = 2**18  # a deletion's share of the database's log, many times over
_SCHEMA = """
CREATE TABLE IF NOT EXISTS videos (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, key TEXT UNIQUE, status TEXT NOT NULL,
    expires_at REAL, job BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS images (id TEXT PRIMARY KEY, expires_at REAL NOT NULL, media_type TEXT NOT NULL);
"""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One video job. Times are seconds since 1970.

    Attributes:
        params: resolved when it came, its seed included, so that a second run makes the same pixels.
        attempts: how often it has begun to run in a server that then stopped.
        key, digest: of the Idempotency-Key and what it was used for.
        trace: headers that name the span below which its own belong.
    """

    id: str
    model: str
    params: SamplingParams
    created_at: float
    warnings: tuple[str, ...] = ()
    status: Status = "queued"
    attempts: int = 0
    completed_at: float | None = None
    expires_at: float | None = None
    error: tuple[str, str] | None = None  # code and message
    timings: dict[str, float] = {}
    peak_memory_mb: float = 0.0
    key: str | None = None
    digest: str = ""
    trace: dict[str, str] = {}


class Store:
    """Thread-safe. One server at a time holds a folder. Some space is held back there, so that on a full disk jobs can
    still be deleted.

    Raises :class:`OutputError` for a folder that cannot be used, and :class:`StartFailed` where another server has it.
    """

    def __init__(self, folder: Path) -> None:
        folder = self.folder = files.check_folder(folder, _ELSEWHERE)
        os.chmod(folder, 0o700)
        self._lock_file = open(folder / "lock", "w")  # noqa: SIM115
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock_file.close()
            rule = f"another server uses the folder {str(folder)!r}; {_ELSEWHERE}"
            raise StartFailed(rule, code="data_in_use") from None
        self._lock = threading.Lock()
        self._reserve = folder / "reserve"
        self._gone: set[str] = set()  # deleted jobs whose rows, or files, could not be
        self._places: dict[str, int] = {}  # of the jobs deleted last: a client may delete what it pages through
        self._remove_halves()
        self._hold_back()
        try:
            self._db = sqlite3.connect(folder / "jobs.sqlite", check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error as error:
            self._lock_file.close()
            raise OutputError(f"cannot use {str(folder / 'jobs.sqlite')!r}: {error}; {_ELSEWHERE}") from None

    def close(self) -> None:
        with contextlib.suppress(OutputError):
            self._forget_gone()
        with self._lock:
            self._db.close()
            self._lock_file.close()

    def _all(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        try:
            with self._lock:
                return self._db.execute(statement, values).fetchall()
        except sqlite3.OperationalError as error:
            raise _unstored(error) from None

    def add(self, job: Job) -> Job:
        """Store a new job; the one that its Idempotency-Key has stored before, if any."""
        self._forget_gone()  # one of them may have the same key
        encoded = msgspec.json.encode(job)
        rule = "ON CONFLICT (key) DO NOTHING RETURNING id"
        statement = f"INSERT INTO videos (id, key, status, job) VALUES (?, ?, ?, ?) {rule}"
        if self._all(statement, job.id, job.key, job.status, encoded):
            return job
        assert job.key is not None  # what has none is in nobody's way
        return self.get(job.key, "key") or self.add(job)  # it has been deleted meanwhile

    def update(self, job: Job) -> None:
        """Store what has become of a job; of one that was deleted meanwhile, remove the files."""
        statement = "UPDATE videos SET status = ?, expires_at = ?, job = ? WHERE id = ? RETURNING id"
        found = self._all(statement, job.status, job.expires_at, msgspec.json.encode(job), job.id)
        if not found or job.id in self._gone:
            self._remove_files(job.id)

    def get(self, name: str, column: Literal["id", "key"] = "id") -> Job | None:
        """The job of this id, or that this Idempotency-Key has made."""
        found = self._all(f"SELECT job FROM videos WHERE {column} = ?", name)
        job = _job(found[0][0]) if found else None
        return None if job is None or job.id in self._gone else job

    def page(self, after: str | None, limit: int, newest_first: bool) -> list[Job] | None:
        """Up to ``limit`` jobs that follow ``after``, which may have just been deleted; None where it is not known."""
        place = None
        if after is not None:
            found = self._all("SELECT number FROM videos WHERE id = ?", after)
            place = found[0][0] if found else self._places.get(after)
            if place is None:
                return None
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")
        there = f"(? IS NULL OR number {sign} ?) AND id NOT IN (SELECT value FROM json_each(?))"
        statement = f"SELECT job FROM videos WHERE {there} ORDER BY number {order} LIMIT ?"
        return [_job(row[0]) for row in self._all(statement, place, place, json.dumps([*self._gone]), limit)]

    def unfinished(self) -> list[Job]:
        """Oldest first."""
        rows = self._all("SELECT job FROM videos WHERE status IN ('queued', 'in_progress') ORDER BY number")
        return [_job(row[0]) for row in rows]

    def delete(self, job_id: str) -> bool:
        """Forget a job and its files. False where there is none.

        While its file cannot be removed, or nothing can be written, not even into the space held back, it is forgotten
        in memory: gone for every client, but a next server would find it.
        """
        if self.get(job_id) is None:
            return False
        self._gone.add(job_id)
        with contextlib.suppress(OutputError):
            self._forget_gone()
        return True

    def _forget_gone(self) -> None:
        gone = set(self._gone)
        for job_id in gone - self._remove_files(*gone):  # first the files: that makes room
            try:
                self._forget(job_id)
            except OutputError:
                if not self._reserve.exists():
                    raise
                self._reserve.unlink(missing_ok=True)
                self._forget(job_id)
            self._gone.discard(job_id)
        self._hold_back()

    def _forget(self, job_id: str) -> None:
        for (place,) in self._all("DELETE FROM videos WHERE id = ? RETURNING number", job_id):
            self._places[job_id] = place
        for old in list(self._places)[:-_PLACES]:
            self._places.pop(old, None)

    def _hold_back(self) -> None:
        """Take the space for deletions on a full disk, if there is any."""
        if self._reserve.exists():
            return
        try:
            # Bytes that no file system can compress to nothing.
            self._reserve.write_bytes(os.urandom(_RESERVE_BYTES))
        except OSError:
            self._reserve.unlink(missing_ok=True)

    def add_image(self, image_id: str, contents: list[bytes], media_type: str, expires_at: float) -> None:
        """The files of one answer, all or none. Raises :class:`OutputError`."""
        extension, is_new = media_type.partition("/")[2], self.image(image_id) is None
        # First: files that nothing tells of would never expire.
        self._all("INSERT OR REPLACE INTO images VALUES (?, ?, ?)", image_id, expires_at, media_type)
        try:
            for variant, content in enumerate(contents):
                self.write(f"{image_id}_{variant}", extension, partial(_write_bytes, content))
        except OutputError:
            if is_new:  # else another answer names them too
                self._remove_files(image_id)
            raise

    def image(self, image_id: str) -> tuple[str, float] | None:
        """Media type, and when it expires."""
        found = self._all("SELECT media_type, expires_at FROM images WHERE id = ?", image_id)
        return cast("tuple[str, float]", found[0]) if found else None

    def write(self, name: str, extension: str, save: Callable[[Path], None]) -> None:
        """A file, whole or not at all. Raises :class:`OutputError`."""
        try:
            files.write(self.folder, name, extension, save, overwrite=True, remedy=_ELSEWHERE)
        except OutputError as error:
            raise _unstored(error) from None

    def path(self, name: str, extension: str) -> Path:
        return self.folder / f"{name}.{extension}"

    def _remove_files(self, *media_ids: str) -> set[str]:
        """Returns the ids of which a file could not be removed; the log says why."""
        gone, kept = set(media_ids), set()
        for path in self._files() if gone else ():
            # What follows the id, which holds one "_", is a variant's name.
            media_id = "_".join(path.stem.split("_")[:2])
            if media_id in gone and not _removed(path):
                kept.add(media_id)
        return kept

    def _files(self) -> list[Path]:
        try:
            return list(self.folder.iterdir())
        except OSError as error:
            logger.error("cannot list the files of jobs: %s", error)
            return []

    def _remove_halves(self) -> None:
        """What a server that was killed has left of files that it was writing."""
        for path in self._files():
            if path.name.startswith((".video_", ".img_")) and files.is_temporary(path.name):
                _removed(path)

    def sweep(self) -> None:
        """Remove files that have expired, and forget ids a day later."""
        self._forget_gone()
        now = time.time()
        for table in ("videos", "images"):
            expired = self._all(f"SELECT id, expires_at FROM {table} WHERE expires_at < ?", now)
            kept = self._remove_files(*(media_id for media_id, _ in expired))
            for media_id, expired_at in expired:
                if expired_at < now - _KNOWN_S and media_id not in kept:
                    self._all(f"DELETE FROM {table} WHERE id = ?", media_id)


def _removed(path: Path) -> bool:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.error("cannot remove a file: %s", error)
        return False
    return True


def _unstored(error: Exception) -> OutputError:
    """Logged here, since clients are not told why."""
    logger.error("cannot store: %s", error)
    return OutputError(str(error))


def _write_bytes(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def _job(encoded: bytes) -> Job:
    return msgspec.json.decode(encoded, type=Job)
