"""Pipelines: schedules as data, their simulation and their execution.

Each name is imported from where it lives when it is first used: the executor needs no simulation.
Nothing here imports JAX; `geojax.pipeline.execution` does.
"""

from typing import TYPE_CHECKING

from geojax.lazy_names import importer

if TYPE_CHECKING:
    from geojax.pipeline.generators import geopipe as geopipe
    from geojax.pipeline.generators import gpipe as gpipe
    from geojax.pipeline.generators import interleaved as interleaved
    from geojax.pipeline.generators import latency_hiding as latency_hiding
    from geojax.pipeline.generators import one_forward_one_backward as one_forward_one_backward
    from geojax.pipeline.generators import zbv as zbv
    from geojax.pipeline.generators import zero_bubble_h1 as zero_bubble_h1
    from geojax.pipeline.generators import zero_bubble_h2 as zero_bubble_h2
    from geojax.pipeline.registry import SCHEDULES as SCHEDULES
    from geojax.pipeline.registry import ScheduleEntry as ScheduleEntry
    from geojax.pipeline.registry import schedule_entry as schedule_entry
    from geojax.pipeline.rules import Invariant as Invariant
    from geojax.pipeline.rules import ScheduleError as ScheduleError
    from geojax.pipeline.rules import validate as validate
    from geojax.pipeline.rules import validate_table as validate_table
    from geojax.pipeline.schedule import Action as Action
    from geojax.pipeline.schedule import Kind as Kind
    from geojax.pipeline.schedule import LayerBytes as LayerBytes
    from geojax.pipeline.schedule import MemoryLimit as MemoryLimit
    from geojax.pipeline.schedule import Placement as Placement
    from geojax.pipeline.schedule import Schedule as Schedule
    from geojax.pipeline.schedule import TickTable as TickTable
    from geojax.pipeline.simulation.costs import Costs as Costs
    from geojax.pipeline.simulation.costs import Hop as Hop
    from geojax.pipeline.simulation.lock_step import lock_step as lock_step
    from geojax.pipeline.simulation.simulator import simulate as simulate
    from geojax.pipeline.simulation.timeline import TimedMessage as TimedMessage
    from geojax.pipeline.simulation.timeline import Timeline as Timeline
    from geojax.pipeline.simulation.timeline import WorkSpan as WorkSpan
    from geojax.pipeline.tick_tables import best_tick_table as best_tick_table
    from geojax.pipeline.tick_tables import tick_table as tick_table

_NAMES = {
    "geojax.pipeline.generators": "geopipe gpipe interleaved latency_hiding "
    "one_forward_one_backward zbv zero_bubble_h1 zero_bubble_h2",
    "geojax.pipeline.registry": "SCHEDULES ScheduleEntry schedule_entry",
    "geojax.pipeline.rules": "Invariant ScheduleError validate validate_table",
    "geojax.pipeline.schedule": "Action Kind LayerBytes MemoryLimit Placement Schedule TickTable",
    "geojax.pipeline.simulation.costs": "Costs Hop",
    "geojax.pipeline.simulation.lock_step": "lock_step",
    "geojax.pipeline.simulation.simulator": "simulate",
    "geojax.pipeline.simulation.timeline": "TimedMessage Timeline WorkSpan",
    "geojax.pipeline.tick_tables": "best_tick_table tick_table",
}


__getattr__ = importer(__name__, _NAMES)
