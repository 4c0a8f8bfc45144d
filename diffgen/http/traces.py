"""OpenTelemetry spans of generations: the whole, the wait, each stage, and the sending of the result.

The packages are those of ``diffgen[otel]``, imported only where spans are asked for.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import diffgen
from diffgen.errors import DiffgenError, InvalidRequest, StartFailed
from diffgen.handle import Event, GenerationHandle, is_final
from diffgen.wire.messages import Progress, Restarting

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

    from diffgen.result import GenerationResult

# That the last spans may take on their way while the server ends.
_FLUSH_S = 5.0


class Traces:
    """Makes spans and sends them to a collector, from a thread of its own.

    Args:
        endpoint: URL that takes OTLP over HTTP, such as ``http://127.0.0.1:4318/v1/traces``.
        exporter: in place of the one to ``endpoint``.

    Raises :class:`InvalidRequest` for what is no URL, and :class:`StartFailed` where the packages are missing.
    """

    def __init__(self, endpoint: str, exporter: SpanExporter | None = None) -> None:
        if not endpoint.startswith(("http://", "https://")):
            rule = "it must be a URL, such as http://127.0.0.1:4318/v1/traces"
            raise InvalidRequest(f"otlp_traces_endpoint is {endpoint!r}; {rule}", param="otlp_traces_endpoint")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            remedy = "pip install 'diffgen[otel]', or leave it out"
            raise StartFailed(f"otlp_traces_endpoint needs a package that is missing ({error}); {remedy}") from None
        about = {
            "service.name": os.environ.get("OTEL_SERVICE_NAME", "diffgen"),
            "service.version": diffgen.__version__,
        }
        # Its own hook at exit would wait for a collector that does not answer.
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("diffgen", diffgen.__version__)

    def begin(self, headers: Mapping[str, str], **attributes: Any) -> Trace:
        """A trace of one generation, below the caller's own span if ``headers`` name one (``traceparent``)."""
        from opentelemetry.propagate import extract

        return Trace(self._tracer, extract(dict(headers)), attributes)

    def close(self) -> None:
        """Send what is left, for at most some seconds."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(_FLUSH_S)


class Trace:
    """The spans of one generation; those of its parts are made by :meth:`end`, when all is known."""

    def __init__(self, tracer: Tracer, context: Context, attributes: dict[str, Any]) -> None:
        from opentelemetry.trace import SpanKind, get_current_span, set_span_in_context

        self._tracer = tracer
        self._began = time.time_ns()
        name = f"generate_content {attributes.get('gen_ai.request.model', '')}".strip()
        self._whole = tracer.start_span(name, context, SpanKind.SERVER, attributes=attributes, start_time=self._began)
        self._within = set_span_in_context(self._whole, context)
        # The caller's own span, or this one where there is none.
        self._above = context if get_current_span(context).get_span_context().is_valid else self._within
        self._handle: GenerationHandle | None = None
        self._stages: list[tuple[str, int, int]] = []  # name, units and end of each, in order
        self._restarts: list[int] = []
        self._answered: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        """For :meth:`Traces.begin`, so that the spans of another run of the same work belong to the same trace."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        found: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(found, self._above)
        return found

    def follow(self, handle: GenerationHandle) -> None:
        """Take the times from the events of this request, in place of an earlier one."""
        self._handle = handle
        self._stages.clear()
        handle.subscribe(self._note)

    def _note(self, event: Event) -> None:
        now = time.time_ns()
        if isinstance(event, Progress):
            if self._stages and self._stages[-1][0] == event.stage:
                self._stages.pop()
            self._stages.append((event.stage, event.step, now))
        elif isinstance(event, Restarting):
            self._restarts.append(now)
        elif is_final(event):
            self._answered = now

    def end(self, error: str | None = None) -> None:
        """The answer has been sent, or what there is of it; ``error`` is the code of a failure after the result."""
        from opentelemetry.trace import Status, StatusCode

        result, failure = self._outcome()
        failure = failure or error
        ended, timings = time.time_ns(), {} if result is None else result.timings
        whole = self._whole
        whole.set_attributes(self._about(result))
        for moment in self._restarts:
            whole.add_event("restarting", timestamp=moment)
        if failure is not None:
            whole.set_attribute("error.type", failure)
            whole.set_status(Status(StatusCode.ERROR, failure))
        for part, began, until, units in self._parts(timings, ended):
            attributes: dict[str, Any] = {} if units is None else {"diffgen.units": units}
            if part in timings:
                # Between its units others had theirs.
                attributes["diffgen.busy_seconds"] = timings[part]
            self._tracer.start_span(part, self._within, attributes=attributes, start_time=began).end(until)
        whole.end(ended)

    def _outcome(self) -> tuple[GenerationResult | None, str | None]:
        if self._handle is None or not self._handle.done():
            return None, "client_closed_request"
        try:
            return self._handle.result(), None
        except DiffgenError as error:
            return None, error.code

    def _about(self, result: GenerationResult | None) -> dict[str, Any]:
        """By the names of OpenTelemetry's conventions for generative models where these have one; never a prompt."""
        if self._handle is None:
            return {}
        params = self._handle.params if result is None else result.params
        found = {
            "gen_ai.operation.name": "generate_content",
            "gen_ai.provider.name": "diffgen",
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.choice.count": params.num_outputs_per_prompt,
            "diffgen.generation": self._handle.id,
            **{
                f"diffgen.{name}": getattr(params, name)
                for name in ("width", "height", "num_frames", "num_inference_steps")
            },
        }
        return {name: value for name, value in found.items() if value is not None}

    def _parts(self, timings: Mapping[str, float], ended: int) -> list[tuple[str, int, int, int | None]]:
        """Name, begin, end and units of each child span. A stage begins where the one before it has ended."""
        stages = list(self._stages)
        answered = self._answered or ended
        first = stages[0][2] if stages else answered
        started = min(self._began + int(timings.get("queue", 0.0) * 1e9), first) if stages else answered
        found: list[tuple[str, int, int, int | None]] = [("queue", self._began, started, None)]
        for name, units, until in stages:
            found.append((name, found[-1][2], until, units))
        # From the last unit the result is on its way here; then it is encoded and sent.
        found.append(("send", found[-1][2], ended, None))
        return found
