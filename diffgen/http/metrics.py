"""Numbers for Prometheus: of HTTP from here, of the work from the ranks' answers and results."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import diffgen
from diffgen.api import DiffGenerator
from diffgen.handle import Event, GenerationHandle
from diffgen.result import GenerationResult
from diffgen.wire.messages import Failed, Status

disable_created_metrics()  # type: ignore[no-untyped-call]

# Up to most of an hour: clips take long.
_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560)


class Metrics:
    """Labels are few and bounded: never a prompt, a path or an id. Thread-safe."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        made = self._registry
        labels = ("model", "task")
        self._http = Counter(
            "diffgen_http_requests", "HTTP requests answered.", ("route", "method", "code"), registry=made
        )
        self._http_seconds = Histogram(
            "diffgen_http_request_duration_seconds", "Until the last byte.", ("route",), buckets=_BUCKETS, registry=made
        )
        self._ended = Counter("diffgen_requests", "Generations ended.", (*labels, "status"), registry=made)
        self._seconds = Histogram(
            "diffgen_request_duration_seconds", "From arrival to result.", labels, buckets=_BUCKETS, registry=made
        )
        self._queued = Histogram(
            "diffgen_queue_time_seconds", "From arrival to the first unit.", labels, buckets=_BUCKETS, registry=made
        )
        self._stages = Histogram(
            "diffgen_stage_duration_seconds",
            "Of each stage of a request.",
            ("model", "stage"),
            buckets=_BUCKETS,
            registry=made,
        )
        self._steps = Counter("diffgen_denoise_steps", "Denoising steps of ended requests.", ("model",), registry=made)
        self._images = Counter("diffgen_images_generated", "Still images made.", ("model",), registry=made)
        self._frames = Counter("diffgen_video_frames_generated", "Frames of clips made.", ("model",), registry=made)
        self._memory = Gauge(
            "diffgen_gpu_memory_peak_bytes", "Most memory that rank 0 has held.", ("model",), registry=made
        )
        self._build = Gauge("diffgen_build", "Always 1.", ("version",), registry=made)
        self._build.labels(diffgen.__version__).set(1)

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        self._http.labels(route, method if method in _METHODS else "other", str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def finished(self, task: str, result: GenerationResult) -> None:
        """``task`` is image or video."""
        model, timings = result.model, dict(result.timings)
        self._ended.labels(model, task, "ok").inc()
        self._seconds.labels(model, task).observe(timings.pop("total", 0.0))
        self._queued.labels(model, task).observe(timings.pop("queue", 0.0))
        for stage, seconds in timings.items():
            self._stages.labels(model, stage).observe(seconds)
        self._steps.labels(model).inc(result.params.num_inference_steps or 0)
        made = self._frames if task == "video" else self._images
        made.labels(model).inc(len(result.seeds) * (result.params.num_frames or 1))
        self._memory.labels(model).set(result.peak_memory_mb * 2**20)

    def failed(self, model: str, task: str, code: str) -> None:
        self._ended.labels(model, task, code).inc()

    def follow(self, handle: GenerationHandle, model: str, task: str) -> None:
        """Count its end, once, however many HTTP requests wait for it and whoever still does."""

        def note(event: Event) -> None:
            if isinstance(event, GenerationResult):
                self.finished(task, event)
            elif isinstance(event, Failed):
                self.failed(model, task, event.error.code)

        handle.subscribe(note)

    def text(self, generator: DiffGenerator | None, status: Status | None) -> bytes:
        """The exposition, with what the ranks have said last, if they have."""
        live = CollectorRegistry()
        live.register(_Live(generator, status))
        return generate_latest(self._registry) + generate_latest(live)


_METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "PUT", "PATCH", "OPTIONS"})


class _Live(Collector):
    """What the ranks say now."""

    def __init__(self, generator: DiffGenerator | None, status: Status | None) -> None:
        self._generator, self._status = generator, status

    def collect(self) -> Iterable[Metric]:
        generator, status = self._generator, self._status
        name = "" if generator is None else generator.model.name
        yield _gauge("diffgen_model_loaded", "Whether the model takes requests.", {name: float(generator is not None)})
        if generator is None:
            return
        now = time.monotonic()
        ranks = {str(rank.rank): rank for rank in generator.ranks()}
        up = {number: rank.ready is not None for number, rank in ranks.items()}
        yield _gauge("diffgen_worker_up", "Ranks that are ready.", up, "rank")
        seen = {number: time.time() - (now - rank.last_seen) for number, rank in ranks.items()}
        yield _gauge(
            "diffgen_worker_last_heartbeat_timestamp_seconds", "When a rank last told that it lives.", seen, "rank"
        )
        if status is None:
            return  # the ranks are being started again
        yield _gauge("diffgen_requests_running", "Requests in work.", {name: status.running})
        yield _gauge("diffgen_requests_queued", "Requests that wait.", {name: status.queued})
        yield _counter("diffgen_ticks", "Ticks of the ranks.", {name: status.ticks})
        yield _counter("diffgen_tick_seconds", "Time of all ticks.", {name: status.tick_seconds})
        yield _counter("diffgen_restarts", "Times that the ranks were started again.", {name: status.restarts})
        malformed = "Messages to the ranks that could not be read."
        yield _counter("diffgen_malformed_messages", malformed, {name: status.malformed})
        by = {"finished": "outcome", "refused": "code", "units": "stage", "batches": "size"}
        texts = {"finished": "Requests of all clients that have ended.", "refused": "Requests not accepted."}
        texts |= {"units": "Units run for a request.", "batches": "Units by the requests that shared them."}
        for field, label in by.items():
            counts: dict[Any, int] = getattr(status, field)
            metric = f"diffgen_requests_{field}" if field in ("finished", "refused") else f"diffgen_{field}"
            yield _counter(metric, texts[field], {str(key): count for key, count in counts.items()}, label)


def _gauge(name: str, text: str, values: Mapping[str, float], label: str = "model") -> Metric:
    family = GaugeMetricFamily(name, text, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), float(value))
    return family


def _counter(name: str, text: str, values: Mapping[str, float], label: str = "model") -> Metric:
    family = CounterMetricFamily(name, text, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), float(value))
    return family
