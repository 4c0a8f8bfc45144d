"""A collector of OpenTelemetry's spans, for tests."""

from __future__ import annotations

import contextlib
import http.server
from typing import Any

from local_http import Quiet, running
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector(http.server.ThreadingHTTPServer):
    """What OpenTelemetry's spans are sent to."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Collect)
        self.spans: list[Any] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"

    def of(self, generation: str) -> tuple[Any, list[Any]]:
        """The span of a generation, and those below it."""
        (whole,) = (span for span in self.spans if values(span).get("diffgen.generation") == generation)
        return whole, [span for span in self.spans if span.parent_span_id == whole.span_id]


def values(span: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


class _Collect(Quiet):
    server: Collector

    def do_POST(self) -> None:
        sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        for resource_spans in sent.resource_spans:
            for scope in resource_spans.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()


def collecting() -> contextlib.AbstractContextManager[Collector]:
    return running(Collector())
