"""The runtime protocol: what a trainer needs of whatever computes the steps of a run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import jax
import numpy as np

from geojax.config.run_config import RunConfig
from geojax.step.plan import StepPlan
from geojax.step.resolved import Step
from geojax.step.state import TrainState
from geojax.train.links.run_links import RunLinks

State = TypeVar("State")

Batch = Mapping[str, np.ndarray]
"""This process's sequences of a global batch: arrays [sequences, ...] by name."""

OtherBatches = Callable[[int], Batch]
"""Function that returns the same sequences of another site, by the number of the site."""


class SaveName(NamedTuple):
    """The name by which the parts of a save belong together."""

    run: str
    membership_id: int | None
    """Record of who takes part, where sites go on without a lost one; None: all do."""


class Runtime(Protocol[State]):
    """One way to compute the steps of a run: one program over all sites, or one of several islands.

    All processes of a run call its methods together and in the same order.
    """

    @property
    def config(self) -> RunConfig:
        """The run of all sites."""
        ...

    @property
    def resolved(self) -> Step:
        """The choices of the run."""
        ...

    @property
    def plan(self) -> StepPlan:
        """The step on the devices of this runtime."""
        ...

    @property
    def layouts(self) -> TrainState:
        """The `LeafLayout` of each leaf of this runtime's state in a checkpoint."""
        ...

    @property
    def parts(self) -> Sequence[TrainState]:
        """The `LeafLayout` of each leaf of each site's part of a checkpoint; () in one program."""
        ...

    @property
    def sequences(self) -> int:
        """Sequences of a step's batch, over all processes; a batch of validation is a full one."""
        ...

    @property
    def links(self) -> RunLinks:
        """The links between the sites."""
        ...

    @property
    def fp8_programs(self) -> Sequence[jax.stages.Compiled]:
        """Programs of a layer whose products XLA is to make in FP8; none on another backend."""
        ...

    def initial_state(self) -> State:
        """Return the state before the first step, with random weights."""
        ...

    def as_saved(self, state: State) -> TrainState:
        """Return a state as its checkpoint has it."""
        ...

    def from_saved(self, saved: TrainState) -> State:
        """Invert `as_saved`."""
        ...

    def agree_on_save(self, step: int, saved: TrainState) -> SaveName | None:
        """Check that sites hold the same weights where they should, and name their save.

        Returns:
            The name of their save; None in one program.

        Raises:
            RunError: some sites hold other weights.
        """
        ...

    def step(
        self,
        state: State,
        batch: Batch,
        requests: Mapping[str, bool],
        others: OtherBatches | None = None,
    ) -> tuple[State, Mapping[str, Any]]:
        """Start a step; it may still run when this returns.

        Args:
            state: donated, and not to be used again.
            batch: this process's sequences.
            requests: True where this process asks all processes to "stop" or to "save".
            others: the sequences of other sites, for islands that go on without them.

        Returns:
            The next state and the step's metrics: scalars, the same on every process, with the
            number of processes that ask for each of the requests.
        """
        ...

    def evaluate(self, state: State, batch: Batch, others: OtherBatches | None = None) -> Any:
        """Return [sum of losses, number of targets] of a batch, the same on every process.

        Args:
            state: the state.
            batch: this process's sequences.
            others: the sequences of other sites, for islands that go on without them.
        """
        ...

    def replanned(self, step: Step) -> Self | None:
        """Compile another step of the same run and mesh; None: its program is this one's."""
        ...

    def of_batch(self, sequences: int) -> Self:
        """Return the runtime of batches of another size of the ramp, on the same state."""
        ...

    def adopt(self, state: State) -> State:
        """Return the state of a runtime that this one was planned anew from."""
        ...

    def whole_weights(self, state: State) -> Any:
        """Return the weights in the compute dtype, unsharded, on process 0's first device.

        Adapters are merged into the kernels that they lie beside. Every process calls it, and the
        others get None. Where `ungathered_reason` gives no reason, the weights fit there.
        """
        ...

    def ungathered_reason(self) -> str | None:
        """Say why the whole model cannot be gathered on one device; None: it can be."""
        ...

    def describe(self) -> list[str]:
        """Return the lines that open a run: its layout, and the choices made for the machine."""
        ...
