"""The runs that layouts of a plan are: their configs, written and traced."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pydantic
import yaml

from geojax.config.layout_sections import BatchSettings, RampSettings
from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.planner.resolve.run_layout import run_settings
from geojax.planner.resolve.run_memory import run_memory
from geojax.planner.search.advice import what_would_run
from geojax.planner.search.fit import least_room, rooms
from geojax.quantities import quantity
from geojax.settings import validate

if TYPE_CHECKING:
    from geojax.planner.cost.layout import LayoutCandidate
    from geojax.planner.search.request import PlanRequest
    from geojax.planner.search.search import Candidate

TRACED_ABOVE = 0.75
"""Share of the usable memory from which the closed form, which may miss by a fifth, is not enough
for the first layout of a plan."""

_DEFAULT_STEPS = 1000


class Traced(NamedTuple):
    """The memory of a layout by its trace."""

    fits: bool
    line: str
    """Its bytes beside those in closed form."""


class FittingRun(NamedTuple):
    """Layouts of a plan of which the first fits."""

    best: "tuple[Candidate, ...]"
    left_out: tuple[str, ...]
    """A line for each layout that was faster and does not fit."""


class PlannedRuns:
    """The runs that a plan's layouts are."""

    def __init__(
        self, request: "PlanRequest", new_run: Mapping[str, Any], config: RunConfig | None
    ):
        """Without a `config` to keep the rest of, the rest is that of `new_run`."""
        self._request, self._new_run, self._config = request, new_run, config
        self._known: dict[LayoutCandidate, Traced] = {}

    @property
    def _ramp(self) -> RampSettings | None:
        return None if self._config is None else self._config.batch.ramp

    def traced(self, candidate: "Candidate") -> Traced:
        """Trace the memory of a layout, and compare it with the closed form."""
        if candidate.layout not in self._known:
            self._known[candidate.layout] = self._trace(candidate)
        return self._known[candidate.layout]

    def beginning_with_one_that_fits(self, best: "Sequence[Candidate]") -> "FittingRun":
        """Leave out the first layouts until one fits by its trace, where the closed form may miss.

        One that `geojax train` cannot run is not traced.
        """
        left_out = list[str]()
        for row, each in enumerate(best):
            share = least_room(self._request, each.layout).share
            if share <= TRACED_ABOVE or not each.layout.is_trainable or self.traced(each).fits:
                return FittingRun(tuple(best[row:]), tuple(left_out))
            left_out.append(f"left out: {each.layout}: {self.traced(each).line}")
        return FittingRun((), tuple(left_out))

    def _trace(self, candidate: "Candidate") -> Traced:
        if not candidate.layout.is_trainable:
            return Traced(False, "not traced: geojax train cannot run it")
        config = validate(RunConfig, self._content(candidate), "geojax plan")
        closed = rooms(self._request, candidate.layout)
        traced = [
            run_memory(config, room.site.accelerator, site if len(closed) > 1 else None).bytes
            for site, room in enumerate(closed)
        ]
        fits = all(own <= room.usable_bytes for own, room in zip(traced, closed, strict=True))
        line = (
            f"traced {_listed(traced)} a device, {_listed(room.memory.bytes for room in closed)} "
            f"in closed form; it {'fits' if fits else 'does not fit'}"
        )
        return Traced(fits, line)

    def write_first_that_fits(self, best: "Sequence[Candidate]", path: Path) -> int:
        """Write the config of the first layout that fits by its trace; return its row.

        Raises:
            UserError: none of them does, or the file cannot be written.
        """
        if not any(each.layout.is_trainable for each in best):
            raise UserError(
                f"--output {path}: geojax train needs the same mesh and as many sequences in each "
                "site, which no layout of the table has; "
                f"{what_would_run(self._request.topology)}"
            )
        rows = enumerate(best, 1)
        row = next((row for row, each in rows if self.traced(each).fits), None)
        if row is None:
            raise UserError(
                f"--output {path}: no layout of the table fits by its trace; more --rows might"
            )
        chosen = best[row - 1]
        lines = [
            f"# {chosen.layout}",
            f"# predicted by geojax plan: {chosen.seconds:.3g} s a step, "
            f"{quantity(chosen.memory.bytes, 'B')} a device",
        ]
        content = self._content(chosen)
        if self._ramp is not None and content["batch"].get("ramp") is None:
            lines.append("# batch.ramp is left out: its sizes are no whole microbatches here.")
        if self._config is None:
            lines.append("# Replace data by your own text (geojax data prepare).")
        text = yaml.safe_dump(content, sort_keys=False)
        try:
            path.write_text("\n".join([*lines, text]), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--output {path}: cannot be written ({error.strerror})") from None
        return row

    def _content(self, candidate: "Candidate") -> dict[str, Any]:
        layout = candidate.layout
        settings = run_settings(layout)
        if self._ramp is not None:
            settings["batch"] = _with_ramp(settings["batch"], self._ramp)
        kept = self._new_run
        if self._config is not None:
            kept = self._config.model_dump(mode="json", exclude_unset=True, exclude={"pipeline"})
        if layout.dc.join == "islands" and kept.get("simulate_devices") is not None:
            settings["simulate_devices"] = layout.devices_per_site[0]  # one process in each site
        return {**kept, **settings}


def _with_ramp(batch: Mapping[str, Any], ramp: RampSettings) -> Mapping[str, Any]:
    """Return the settings of a batch with a ramp, if that has whole microbatches there."""
    ramped = {**batch, "ramp": ramp.model_dump()}
    try:
        BatchSettings.model_validate(ramped)
    except pydantic.ValidationError:
        return batch
    return ramped


def _listed(sizes: Iterable[float]) -> str:
    return ", ".join(quantity(size, "B") for size in sizes)


def new_run(model: Path, topology: str, request: "PlanRequest") -> dict[str, Any]:
    """Return the settings, but for the layout, of a run of a model that has no config yet.

    Args:
        model: name or file of the model.
        topology: name or file of the topology.
        request: what is planned.
    """
    content: dict[str, Any] = {
        "run_directory": f"runs/{model.stem}-{request.topology.name}",
        "steps": _DEFAULT_STEPS,
        "topology": topology,
        "model": str(model),
        "data": {"sources": [{"name": "python", "builtin": "python-stdlib"}]},
    }
    if request.accelerator.name == "simulated":
        content["simulate_devices"] = request.topology.accelerators
    return content
