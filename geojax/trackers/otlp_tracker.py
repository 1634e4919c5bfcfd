"""OpenTelemetry as a tracker: gauges by OTLP over HTTP."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from geojax.trackers.tracker import TrackedRun


class OtlpTracker:
    """Gauges `geojax.<metric>` with the attributes run, site and step, a request for each call.

    The points of a step go out at once, without a meter between, which would keep a series for
    every step.
    """

    def __init__(self, endpoint: str, headers: Sequence[Mapping[str, str]], timeout_seconds: float):
        self._endpoint, self._timeout = endpoint, timeout_seconds
        self._headers = {header["name"]: os.environ[header["variable"]] for header in headers}
        self._exporter: Any = None
        self._resource: Any = None
        self._attributes: dict[str, str] = {}

    def start(self, run: TrackedRun) -> None:
        """Describe the run as a service; nothing is sent."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.resources import Resource

        self._exporter = OTLPMetricExporter(
            endpoint=self._endpoint, headers=self._headers or None, timeout=self._timeout
        )
        self._resource = Resource(
            {
                "service.name": "geojax",
                "service.version": run.version,
                "service.instance.id": run.id,
            }
        )
        self._attributes = {"run": run.name, "site": run.site}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send a point of each name.

        Raises:
            ConnectionError: the collector does not take them.
        """
        from opentelemetry.sdk.metrics import export
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        now, attributes = time.time_ns(), {**self._attributes, "step": step}
        metrics = [
            export.Metric(
                name=f"geojax.{name}",
                description=None,
                unit=None,
                data=export.Gauge([export.NumberDataPoint(attributes, 0, now, float(value))]),
            )
            for name, value in values.items()
        ]
        scope = export.ScopeMetrics(InstrumentationScope("geojax"), metrics, "")
        data = export.MetricsData([export.ResourceMetrics(self._resource, [scope], "")])
        if self._exporter.export(data) is not export.MetricExportResult.SUCCESS:
            raise ConnectionError(f"{self._endpoint} does not take the points")

    def finish(self, exit_code: int) -> None:
        """Close the connection."""
        if self._exporter is not None:
            self._exporter.shutdown()
