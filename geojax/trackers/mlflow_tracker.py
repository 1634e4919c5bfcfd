"""MLflow as a tracker."""

import json
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from geojax.settings import leaves_by_key
from geojax.trackers.tracker import TrackedRun

_TAG = "geojax.run"
_MOST_PARAMETERS = 100
"""Parameters that a server takes in one request."""
_LONGEST_VALUE = 500
_NO_NAME = re.compile(r"[^\w\-. /]")


class MlflowTracker:
    """A run of MLflow, which a resumed run finds by a tag and goes on with.

    MLflow keeps both points of a step that a run repeats; their time stamps tell them apart.
    """

    def __init__(self, uri: str | None, experiment: str):
        self._uri, self._experiment = uri, experiment
        self._client: Any = None
        self._run = ""

    def start(self, run: TrackedRun) -> None:
        """Begin the run of MLflow with the config as its parameters, or go on with it."""
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        # A call that a server does not answer takes some seconds, not an hour.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = client = MlflowClient(tracking_uri=self._uri)
        experiment = self._experiment_id()
        earlier = client.search_runs([experiment], f"tags.`{_TAG}` = '{run.id}'", max_results=1)
        if earlier:
            self._run = earlier[0].info.run_id
            client.update_run(self._run, status="RUNNING")
            return
        tags = {_TAG: run.id, "geojax.version": run.version, "geojax.site": run.site}
        begun = client.create_run(experiment, run_name=run.name, tags=tags)
        self._run = begun.info.run_id
        parameters = [
            Param(_NO_NAME.sub("_", key), json.dumps(value)[:_LONGEST_VALUE])
            for key, value in leaves_by_key(run.config)
        ]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            client.log_batch(self._run, params=parameters[first:][:_MOST_PARAMETERS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to the series of each name."""
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        points = [
            Metric(_NO_NAME.sub("_", name), value, now, step) for name, value in values.items()
        ]
        self._client.log_batch(self._run, metrics=points)

    def finish(self, exit_code: int) -> None:
        """Say how the run has ended."""
        status = "FINISHED" if exit_code == 0 else "KILLED" if exit_code > 128 else "FAILED"
        if self._run:
            self._client.set_terminated(self._run, status)

    def _experiment_id(self) -> str:
        """Return the experiment of the name; make it if need be."""
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            try:
                return str(self._client.create_experiment(self._experiment))
            except MlflowException:  # another site was faster
                experiment = self._client.get_experiment_by_name(self._experiment)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)
