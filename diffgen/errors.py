"""Every error that diffgen raises or sends, in one tree.

::

    DiffgenError
    ├── InvalidRequest      the caller's mistake: value, rule and remedy (also a ValueError)
    ├── QueueFull           try again later
    ├── RequestCancelled    the caller, or a client that left, took the request back
    ├── DeadlineExceeded    its time limit has passed, or is too short
    ├── GenerationError     the request failed while it ran
    │   ├── OutOfMemory
    │   ├── NanOutput       non-finite latents or pixels
    │   └── RanksDiverged   ranks computed different values
    ├── ModelError          the model cannot be found, read or served
    ├── OutputError         a result cannot be written
    └── ServerError         the server, not the request
        ├── StartFailed
        ├── WorkerDied
        ├── ServerClosed
        ├── ConnectionFailed
        └── ProtocolError   the two sides speak different versions, or nonsense

``code`` is stable and meant for programs; ``retryable`` says whether the same call may succeed later; ``public`` is
what clients on other machines are told.
"""

from __future__ import annotations

import re
from typing import ClassVar

import msgspec

_PART = r"""[^\s/'",;:()\[\]<>]+"""
# Quoted, or with no space before its second slash and after its last. Two parts make a path: one alone tells nothing,
# and "1 /2" is none. What follows a word, as in image/png, or a host's name does not begin one.
_PATH = re.compile(
    rf"""(?<=')/[^'/]+/[^']*(?=')|(?<=")/[^"/]+/[^"]*(?=")"""
    rf"""|(?:(?<=\bfile://)|(?<![\w/.\]]))/{_PART}/(?:[ ]*{_PART}(?:[ ]+{_PART})*[ ]*/)*(?:{_PART})?"""
)


def without_paths(text: str) -> str:
    """A text that others have made, as of a model's own exception, without absolute paths."""
    return _PATH.sub("(path)", text)


class ErrorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An error as it travels: ``kind`` is the name of its class in this module."""

    kind: str
    code: str
    message: str
    retryable: bool = False
    param: str | None = None
    retry_after: float | None = None

    def public(self) -> ErrorInfo:
        """As clients on other machines are told it."""
        return msgspec.structs.replace(self, message=error_from(self).public)

    def shortened(self, most: int) -> ErrorInfo:
        """With ``most`` characters of its message, and how many are left out."""
        left_out = len(self.message) - most
        if left_out <= 0:
            return self
        return msgspec.structs.replace(self, message=f"{self.message[:most]} ... ({left_out} more characters)")


class DiffgenError(Exception):
    """Base of all errors here. ``param`` names the parameter at fault, ``retry_after`` is seconds until the same call
    may succeed, where they are known."""

    default_code: ClassVar[str] = "internal_error"
    default_retryable: ClassVar[bool] = False
    #: What clients on other machines are told in place of the message, which may name this one's files; None where it
    #: speaks of the request alone.
    told_outside: ClassVar[str | None] = "the server has failed; its log says more"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        retryable: bool | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = self.default_code if code is None else code
        self.retryable = self.default_retryable if retryable is None else retryable
        self.param = param
        self.retry_after = retry_after

    @property
    def public(self) -> str:
        """What clients on other machines are told: the message, where it cannot tell of this machine."""
        return self.message if self.told_outside is None else self.told_outside

    def info(self) -> ErrorInfo:
        return ErrorInfo(type(self).__name__, self.code, self.message, self.retryable, self.param, self.retry_after)

    def prefixed(self, where: str) -> DiffgenError:
        """The same error, with its message told to come from ``where``."""
        return type(self)(
            f"{where}: {self.message}",
            code=self.code,
            retryable=self.retryable,
            param=self.param,
            retry_after=self.retry_after,
        )

    def __reduce__(self) -> tuple[object, tuple[ErrorInfo]]:
        # Keyword-only arguments are lost by the default reduction, and executors of the user's may pickle errors.
        return error_from, (self.info(),)


class InvalidRequest(DiffgenError, ValueError):
    default_code = "invalid_request"
    told_outside = None


class QueueFull(DiffgenError):
    default_code = "queue_full"
    default_retryable = True
    told_outside = None


class RequestCancelled(DiffgenError):
    default_code = "request_cancelled"
    told_outside = None


class DeadlineExceeded(DiffgenError):
    default_code = "deadline_exceeded"
    told_outside = None


class GenerationError(DiffgenError):
    default_code = "generation_failed"

    @property
    def public(self) -> str:
        # It may quote any library, and is all that tells a client what its model cannot do.
        return without_paths(self.message)


class OutOfMemory(GenerationError):
    default_code = "out_of_memory"


class NanOutput(GenerationError):
    default_code = "nan_output"


class RanksDiverged(GenerationError):
    default_code = "ranks_diverged"


class ModelError(DiffgenError):
    default_code = "model_error"
    told_outside = "the model cannot be served; the server's log says why"


class OutputError(DiffgenError):
    default_code = "output_failed"
    told_outside = "the server cannot store its results now, as when its disk is full; its log says more"


class ServerError(DiffgenError):
    default_code = "server_error"


class StartFailed(ServerError):
    default_code = "start_failed"


class WorkerDied(ServerError):
    default_code = "worker_died"
    default_retryable = True

    @property
    def public(self) -> str:
        if self.retryable:
            return "what runs the model has died; try again later"
        return "what runs the model may have died of this request, which will not be tried again"


# The code of a WorkerDied that tells only that another rank is gone.
PEER_LOST = "peer_lost"
# The code of a GenerationError that tells only that another rank has one.
PEER_FAILED = "peer_failed"


class ServerClosed(ServerError):
    default_code = "server_closed"
    told_outside = "the server was stopped"


class ConnectionFailed(ServerError):
    default_code = "connection_failed"
    default_retryable = True
    told_outside = "what runs the model does not answer; try again later"


class ProtocolError(ServerError):
    default_code = "protocol_error"


def _tree(base: type[DiffgenError]) -> dict[str, type[DiffgenError]]:
    found = {base.__name__: base}
    for child in base.__subclasses__():
        found |= _tree(child)
    return found


_KINDS = _tree(DiffgenError)


def error_from(info: ErrorInfo) -> DiffgenError:
    """Rebuild an error from its travelling form; a kind this version does not know becomes a ServerError."""
    kind = _KINDS.get(info.kind, ServerError)
    return kind(info.message, code=info.code, retryable=info.retryable, param=info.param, retry_after=info.retry_after)
