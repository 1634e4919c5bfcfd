"""A step with every choice made: a layout without "auto", and the order of its work.

A planner resolves it once, and every process of the run executes it. It is plain data that a run
keeps as step.yaml.
"""

import functools
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

import pydantic

from geojax.config.layout import Layout
from geojax.config.pipeline_settings import ScheduleName
from geojax.errors import UserError
from geojax.pipeline.rules import validate, validate_table
from geojax.pipeline.schedule import Action, Kind, Placement, Schedule, TickTable
from geojax.quantities import Count
from geojax.settings import Settings, leaves_by_key

_DIGEST_LETTERS = 12
Index = Annotated[int, pydantic.Field(ge=0, lt=2**20)]
"""A position, counted from 0."""

_ACTION = re.compile(r"([FBW])(\d{1,6})\.(\d{1,6})")


class LockStep(Settings):
    """Ticks of a pipeline whose stages work in lock-step."""

    hop_ticks: tuple[Count, ...]
    """Ticks to chunk c+1 from chunk c."""

    return_ticks: tuple[Count, ...]
    """Ticks to chunk c from chunk c+1."""

    starts: tuple[str, ...]
    """For each stage, the tick of each of its actions."""


class PipelineOrder(Settings):
    """The work of a pipeline's stages in a step, in their order."""

    schedule: ScheduleName
    """Name of the schedule that it was made by."""

    stage_of: tuple[Index, ...]
    """Stage of each chunk, in the model's order."""

    microbatches: Count
    """Microbatches of a step."""

    split_backward: bool
    """True if the gradients of weights are actions of their own."""

    actions: tuple[str, ...]
    """Actions of each stage: F3.1 is the forward of microbatch 3 through chunk 1, B its backward
    and W the gradient of the weights."""

    lock_step: LockStep | None = None
    """Ticks of one program; null: a stage begins as soon as its input is there."""

    @classmethod
    def of(cls, order: Schedule | TickTable) -> Self:
        """Describe a schedule, or a table of ticks."""
        schedule = order.schedule if isinstance(order, TickTable) else order
        lock_step = None
        if isinstance(order, TickTable):
            lock_step = LockStep(
                hop_ticks=order.hop_ticks,
                return_ticks=order.return_ticks,
                starts=tuple(" ".join(map(str, stage)) for stage in order.starts),
            )
        return cls(
            schedule=schedule.name,
            stage_of=schedule.placement.stage_of,
            microbatches=schedule.microbatches,
            split_backward=schedule.split_backward,
            actions=tuple(" ".join(map(str, stage)) for stage in schedule.orders),
            lock_step=lock_step,
        )

    @functools.cached_property
    def as_schedule(self) -> Schedule:
        """The order of each stage's actions."""
        return Schedule(
            self.schedule,
            Placement(len(self.actions), self.stage_of),
            self.microbatches,
            self.split_backward,
            tuple(map(_actions, self.actions)),
        )

    @functools.cached_property
    def as_table(self) -> TickTable:
        """The tick of each action, in one program."""
        assert self.lock_step is not None, "sites with runtimes of their own have no ticks"
        ticks = self.lock_step
        starts = tuple(tuple(map(int, stage.split())) for stage in ticks.starts)
        return TickTable(self.as_schedule, ticks.hop_ticks, ticks.return_ticks, starts)

    @pydantic.model_validator(mode="after")
    def _can_be_run(self) -> Self:
        if set(self.stage_of) != set(range(len(self.actions))):
            raise ValueError("stage_of does not name the stages that have actions")
        try:
            validate(self.as_schedule)
            if self.lock_step is not None:
                table = self.as_table
                counts = [list(map(len, each)) for each in (table.starts, table.schedule.orders)]
                hops = {len(table.hop_ticks), len(table.return_ticks)}
                if counts[0] != counts[1] or hops != {len(self.stage_of) - 1}:
                    raise ValueError("lock_step has not the ticks of every action and hop")
                validate_table(table)
        except UserError as error:
            raise ValueError(str(error)) from None
        return self


def _actions(text: str) -> tuple[Action, ...]:
    found = []
    for word in text.split():
        matched = _ACTION.fullmatch(word)
        if matched is None:
            raise ValueError(f"'{word}' is no action such as F0.0")
        kind, microbatch, chunk = matched.groups()
        found.append(Action(Kind(kind), int(microbatch), int(chunk)))
    return tuple(found)


class IslandWork(Settings):
    """The work of a site that trains on its share of the batch in a runtime of its own."""

    layers: tuple[Count, ...]
    """Layers of each chunk, whose gradients are a bucket."""

    held_microbatches: Count
    """Microbatches that are computed at once."""


class Figure(Settings):
    """A predicted number."""

    value: float = pydantic.Field(ge=0, le=1e30)
    source: str
    """The model or program that predicted it."""

    relative_error: Annotated[float, pydantic.Field(ge=0, le=1e3)] | None = None
    """Share by which it may be wrong; null: it was never validated."""


class SmallerStep(Settings):
    """A step of a size of the batch's ramp, as far as it differs from one of the full batch."""

    global_batch_size: Count
    """Sequences of the step, over all sites."""

    pipeline: PipelineOrder | None = None
    """The order of the stages' work; null: there is no pipeline."""

    seconds: Figure | None = None
    """Time of the step; null: it could not be predicted."""

    wait_seconds: Figure | None = None
    """Part of it in which nothing but messages between sites goes on; null: not predicted."""


class MemoryVerdict(Settings):
    """The result of a comparison of a step's memory with that of a device."""

    kind: Literal["unknown", "fits", "may not fit", "does not fit"] = "unknown"
    """Unknown: there is no device to compare with, or no step to estimate. It may not fit where
    the difference is within the estimate's error."""

    line: str = ""
    """The numbers, and ways to make it fit."""


class DescribedDevice(NamedTuple):
    """A device of another runtime, as far as a step is resolved for it."""

    device_kind: str
    """Kind, as JAX names it."""
    process_index: int
    """Index of its process in the runtime."""


class RuntimeDevices(Settings):
    """The devices of one runtime: of all sites in one program, of one site among islands."""

    kind: Annotated[str, pydantic.Field(max_length=256)]
    """Kind, as JAX names it; several kinds are joined by "and"."""

    count: Count
    processes: Count

    @property
    def described(self) -> list[DescribedDevice]:
        """A description of each of them."""
        processes = (number * self.processes // self.count for number in range(self.count))
        return [DescribedDevice(self.kind, process) for process in processes]


class Origin(Settings):
    """The run and the devices that a step was resolved for."""

    geojax: str
    """Version."""

    devices: tuple[RuntimeDevices, ...]
    """Devices of each runtime: of one program, or of each site."""

    topology: dict[str, Any] | None
    """The sites and their links."""

    config: dict[str, Any]
    """The run's settings."""

    def differences(self, other: "Origin") -> list[str]:
        """Name what differs in `other`: versions, devices, and keys of topology and config."""
        of_both = [dict(leaves_by_key(each.model_dump(mode="json"))) for each in (self, other)]
        missing = object()
        names = dict.fromkeys([*of_both[0], *of_both[1]])
        return [
            name.removeprefix("config.")
            for name in names
            if of_both[0].get(name, missing) != of_both[1].get(name, missing)
        ]


class Step(Settings):
    """A run's step with every choice made."""

    layout: Layout
    """The layout; nothing in it is left to choose."""

    pipeline: PipelineOrder | None = None
    """The order of the stages' work; null: there is no pipeline."""

    sites: tuple[IslandWork, ...] = ()
    """The work of each site with `dc.join: islands` and `dc.role: data`; empty otherwise."""

    ramp: tuple[SmallerStep, ...] = ()
    """The steps of `layout.batch.ramp`, ascending; empty without one. All else is of a step of the
    full batch, and buckets, ticks of hops and overlap hold for all."""

    flops_per_token: Annotated[float, pydantic.Field(ge=0, le=1e30)] | None = None
    """FLOPs of the model for a token, forwards and backwards; null: not counted."""

    seconds: Figure | None = None
    """Time of a step; null: it could not be predicted."""

    wait_seconds: Figure | None = None
    """Part of it in which nothing but messages between sites goes on; null: not predicted."""

    bytes_between_sites: Figure | None = None
    """Bytes that the devices of a site together send to other sites; null: not known yet, as of
    islands, which count their messages."""

    memory_bytes: Figure | None = None
    """Memory of the device that needs most; null: it was not estimated."""

    memory: MemoryVerdict = MemoryVerdict()
    """The memory compared with that of the devices."""

    notes: tuple[str, ...] = ()
    """Lines for the log: what was chosen for the link, and why."""

    origin: Origin
    """The run and the devices that it was resolved for."""

    @pydantic.field_validator("sites")
    @classmethod
    def _have_the_same_buckets(cls, sites: tuple[IslandWork, ...]) -> tuple[IslandWork, ...]:
        if len({work.layers for work in sites}) > 1:
            raise ValueError("sites have not the same layers in each chunk")
        return sites

    @pydantic.model_validator(mode="after")
    def _ramp_is_of_the_layout(self) -> Self:
        batch = self.layout.batch
        if tuple(step.global_batch_size for step in self.ramp) != batch.sizes.smaller:
            raise ValueError("ramp has other sizes than layout.batch.ramp")
        for step in self.ramp:
            microbatches = batch.microbatches_of(step.global_batch_size)
            if step.pipeline is not None and step.pipeline.microbatches != microbatches:
                raise ValueError("an order of ramp has not the microbatches of its size")
        return self

    def of_batch(self, sequences: int) -> Self:
        """Return the step of a batch of so many sequences: a size of the ramp, or the full batch.

        The bytes that cross are known where these are gradients. Hops are as many as microbatches.
        """
        if sequences == self.layout.batch.global_batch_size:
            return self
        smaller = next(step for step in self.ramp if step.global_batch_size == sequences)
        layout = self.layout.of_batch(sequences)
        most = layout.batch.microbatches
        sites = tuple(
            work.model_copy(update={"held_microbatches": min(work.held_microbatches, most)})
            for work in self.sites
        )
        crossing = self.bytes_between_sites if layout.dc.role == "data" else None
        update = {
            "layout": layout,
            "pipeline": smaller.pipeline,
            "sites": sites,
            "ramp": (),
            "seconds": smaller.seconds,
            "wait_seconds": smaller.wait_seconds,
            "bytes_between_sites": crossing,
        }
        return self.model_copy(update=update)

    @property
    def digest(self) -> str:
        """Hash of the choices, by which sites compare theirs."""
        content = json.dumps(self.choices, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:_DIGEST_LETTERS]

    @property
    def choices(self) -> dict[str, Any]:
        """Layout and order of work, without figures: the same of two steps that run alike."""
        orders = {"__all__": {"global_batch_size", "pipeline"}}
        included: Any = {"layout": True, "pipeline": True, "sites": True, "ramp": orders}
        return self.model_dump(mode="json", include=included)


def with_layers(layout: Layout, layers: Sequence[int]) -> Layout:
    """Return a layout with so many layers in each chunk of its pipeline."""
    pipeline = layout.pipeline.model_copy(update={"layers": tuple(layers)})
    return layout.model_copy(update={"pipeline": pipeline})
