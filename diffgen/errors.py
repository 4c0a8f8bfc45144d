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

``code`` is stable and meant for programs; ``retryable`` says whether the same call may succeed later.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An error as it travels: ``kind`` is the name of its class in this module."""

    kind: str
    code: str
    message: str
    retryable: bool = False
    param: str | None = None
    retry_after: float | None = None


class DiffgenError(Exception):
    """Base of all errors here. ``param`` names the parameter at fault, ``retry_after`` is seconds until the same call
    may succeed, where they are known."""

    default_code: ClassVar[str] = "internal_error"
    default_retryable: ClassVar[bool] = False

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


class QueueFull(DiffgenError):
    default_code = "queue_full"
    default_retryable = True


class RequestCancelled(DiffgenError):
    default_code = "request_cancelled"


class DeadlineExceeded(DiffgenError):
    default_code = "deadline_exceeded"


class GenerationError(DiffgenError):
    default_code = "generation_failed"


class OutOfMemory(GenerationError):
    default_code = "out_of_memory"


class NanOutput(GenerationError):
    default_code = "nan_output"


class RanksDiverged(GenerationError):
    default_code = "ranks_diverged"


class ModelError(DiffgenError):
    default_code = "model_error"


class OutputError(DiffgenError):
    default_code = "output_failed"


class ServerError(DiffgenError):
    default_code = "server_error"


class StartFailed(ServerError):
    default_code = "start_failed"


class WorkerDied(ServerError):
    default_code = "worker_died"
    default_retryable = True


# The code of a WorkerDied that tells only that another rank is gone.
PEER_LOST = "peer_lost"
# The code of a GenerationError that tells only that another rank has one.
PEER_FAILED = "peer_failed"


class ServerClosed(ServerError):
    default_code = "server_closed"


class ConnectionFailed(ServerError):
    default_code = "connection_failed"
    default_retryable = True


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
