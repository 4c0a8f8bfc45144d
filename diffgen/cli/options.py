"""What the command line takes beside parameters, saving and the server's own options."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class CallOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Input and output."""

    prompt_path: Annotated[
        str | None, Meta(description="UTF-8 file with a prompt a line, instead of prompt; blank lines are skipped")
    ] = None
    from_metadata: Annotated[
        str | None, Meta(description="file saved by diffgen, whose parameters hold where no others are given")
    ] = None
    dry_run: Annotated[
        bool, Meta(description="print the resolved parameters and an estimate of memory; load and make nothing")
    ] = False
    json: Annotated[bool, Meta(description="print one JSON object an output in place of its path")] = False
    quiet: Annotated[bool, Meta(description="show no progress and no warnings")] = False
    timeout: Annotated[
        float | None, Meta(description="seconds after which all that has not ended is cancelled", extra={"min": 0})
    ] = None


class BulkOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Results."""

    output_path: Annotated[str, Meta(description="folder for results and manifest")] = "outputs"
    retry_failed: Annotated[bool, Meta(description="run again what a former run saw fail")] = False
    quiet: Annotated[bool, Meta(description="show no progress")] = False


class ConnectOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A running server, instead of one of this command's own."""

    connect: Annotated[str | None, Meta(description="the server's tcp://HOST:PORT, ipc://PATH or http://HOST:PORT")] = (
        None
    )
    token_file: Annotated[str | None, Meta(description="file that holds the server's token or API key")] = None
