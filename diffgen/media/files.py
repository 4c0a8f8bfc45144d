"""Names and atomic writing of output files."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path

from diffgen.errors import OutputError

#: Extension -> output format.
FORMATS = {"png": "png", "jpg": "jpeg", "jpeg": "jpeg", "webp": "webp", "mp4": "mp4", "gif": "gif"}
MAX_SLUG = 80  # bytes: file systems count bytes, and the seed, index and extension follow
_RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{i}" for port in ("com", "lpt") for i in range(1, 10))}

_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
ELSEWHERE = "choose another folder by output_path"


def slug(prompt: str) -> str:
    """A file name's stem from a prompt: letters and digits of any script, the rest to dashes, at most 80 bytes."""
    text = "".join(
        char if unicodedata.category(char)[0] in "LN" else "-" for char in unicodedata.normalize("NFC", prompt)
    )
    text = re.sub("-+", "-", text).strip("-").encode()[:MAX_SLUG].decode(errors="ignore").strip("-")
    return f"{text}-" if text.lower() in _RESERVED else text or "output"


def split_extension(name: str) -> tuple[str, str]:
    """(stem, extension as written, without its dot) of a name the user chose; other endings belong to the stem."""
    match = re.fullmatch(rf"(.*)\.({'|'.join(FORMATS)})", name, flags=re.IGNORECASE | re.DOTALL)
    return (match[1], match[2]) if match else (name, "")


def check_stem(name: str) -> str:
    """A stem the user chose. Raises :class:`OutputError` if it could leave the folder or is not a name."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise OutputError(f"output_file_name {name!r} must be a plain file name; choose the folder by output_path")
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise OutputError(f"output_file_name {name!r} is not valid Unicode at position {error.start}") from None
    if size > 200:
        raise OutputError(f"output_file_name has {size} bytes; use at most 200")
    return name


def check_folder(folder: Path, remedy: str = ELSEWHERE) -> Path:
    """Make a folder, where ``~`` is the home folder, and make sure that it can be written to.

    Raises :class:`OutputError`.
    """
    try:
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError, RuntimeError) as error:  # for a NUL in the path, and for the home of nobody
        reason = error.strerror if isinstance(error, OSError) else error
        raise OutputError(f"cannot make the output folder {str(folder)!r}: {reason}; {remedy}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write to the output folder {str(folder)!r}: no permission; {remedy}")
    return folder


def reason_of(error: OSError) -> str:
    """Why a file could not be written, in words."""
    return _FULL.get(error.errno or 0) or error.strerror or str(error)


def write(
    folder: Path,
    stem: str,
    extension: str,
    save: Callable[[Path], None],
    overwrite: bool = False,
    remedy: str = ELSEWHERE,
) -> Path:
    """Write a file whole or not at all: ``save`` writes a temporary file, which is then given its name.

    Without ``overwrite`` an existing file is kept and ``_1``, ``_2``, ... is added to the new one's stem. Raises
    :class:`OutputError`, which leaves no file behind.
    """
    temporary = folder / f".{stem[:100]}.{os.getpid()}-{os.urandom(4).hex()}.{extension}"
    try:
        save(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        if overwrite:
            target = folder / f"{stem}.{extension}"
            os.replace(temporary, target)
            return target
        return _name_without_clobbering(temporary, folder, stem, extension)
    except OSError as error:
        where = f"{stem}.{extension} to {str(folder)!r}"
        room = "make room, or " if error.errno in _FULL else ""
        raise OutputError(f"cannot write {where}: {reason_of(error)}; {room}{remedy}") from None
    finally:
        temporary.unlink(missing_ok=True)


def is_temporary(name: str) -> bool:
    """Whether :func:`write` calls a file so while it is not whole, and for ever where the process is killed then."""
    return re.fullmatch(r"\..+\.\d+-[0-9a-f]{8}\.\w+", name, flags=re.DOTALL) is not None


def _name_without_clobbering(temporary: Path, folder: Path, stem: str, extension: str) -> Path:
    for number in itertools.count():
        target = folder / (f"{stem}.{extension}" if number == 0 else f"{stem}_{number}.{extension}")
        with contextlib.suppress(FileExistsError):
            try:
                os.link(temporary, target)  # fails where the name is taken, unlike a rename
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP):
                    raise
                os.close(os.open(target, os.O_CREAT | os.O_EXCL))  # no hard links here: reserve the name, then fill it
                os.replace(temporary, target)
            return target
    raise AssertionError("unreachable")
