"""`/metrics`: what Prometheus reads. Off unless ENGINE_METRICS is set, since who may open the page may read it.

Counters are fed by jobs as they end; what changes by the second is looked up when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.jobs import CompareState, Job, Jobs
from engine.telemetry import Memory

KINDS = {CompareState: "comparison"}
SECONDS = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1200, 3600)


class Metrics:
    """The figures of one server. jobs: watched from now on; memory: as `Engine.memory`."""

    def __init__(self, jobs: Jobs, memory: Callable[[], Memory]) -> None:
        self.registry = CollectorRegistry()
        self._jobs = Counter("jobs", "Jobs that ended", ("kind", "outcome"), registry=self.registry)
        self._frames = Counter("frames", "Frames of finished and stopped videos", registry=self.registry)
        self._stages = Histogram(
            "stage_seconds", "Seconds of each stage of a job", ("stage",), registry=self.registry, buckets=SECONDS
        )
        self.registry.register(_Now(jobs, memory))
        jobs.on_end.append(self.count)

    def count(self, state: Job) -> None:
        """Take in a job that has ended."""
        self._jobs.labels(KINDS.get(type(state), "video"), state.status).inc()
        self._frames.inc(getattr(state, "stats", {}).get("frames") or 0)
        for stage in state.stages:
            if stage.seconds is not None:
                self._stages.labels(stage.name).observe(stage.seconds)


class _Now(Collector):
    """Gauges that are looked up when they are asked for."""

    def __init__(self, jobs: Jobs, memory: Callable[[], Memory]) -> None:
        self.jobs, self.memory = jobs, memory

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("jobs_running", "Jobs at work", self.jobs.running)
        yield GaugeMetricFamily("jobs_waiting", "Jobs in the queue", self.jobs.waiting)
        memory = self.memory()
        yield GaugeMetricFamily("process_memory_bytes", "Host memory of this process", memory.host)
        gauge = GaugeMetricFamily("device_memory_bytes", "Memory of a device", labels=("device", "what"))
        for device in memory.devices:
            for what in ("allocated", "reserved", "peak", "used", "total"):
                gauge.add_metric((device.name, what), getattr(device, what))
        yield gauge


def metrics_router(metrics: Metrics) -> APIRouter:
    """`/metrics` in Prometheus' text format."""
    router = APIRouter()

    @router.get("/metrics")
    def read() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router
