"""The processes of a run that write their metrics."""

from typing import Literal

from geojax.settings import Settings


class MetricsSettings(Settings):
    """Files of metrics. The first process of a run writes `metrics.jsonl`."""

    processes: Literal["first", "all"] = "first"
    """Processes that write metrics: first (of each site) or all. Beside the first process of the
    run each writes `metrics.process-3.jsonl`, by its index, on its own host."""
