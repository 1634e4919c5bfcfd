"""The trainer protocol: what the training loop needs of whatever computes the steps of a run."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from geojax.accelerators import accelerator_of
from geojax.checkpoint import Checkpointer
from geojax.config.run_config import RunConfig
from geojax.islands.traffic import LinkTraffic
from geojax.models import model_flops
from geojax.models.huggingface import HuggingFaceWeights
from geojax.step.plan import StepPlan
from geojax.step.resolved import Step
from geojax.transport import MeasuredLink

State = TypeVar("State")

Batch = Mapping[str, np.ndarray]
"""This process's sequences of a global batch: arrays [sequences, ...] by name."""


@dataclasses.dataclass(frozen=True)
class TrainerFacts:
    """Facts about every step of a trainer, for the log."""

    tokens_per_step: int
    """Tokens of a global batch, padding included."""

    flops_per_token: float
    """Model FLOPs of forward and backward; recomputation does not count."""

    peak_flops: float | None = None
    """FLOP/s of all devices together in the compute dtype; None where they are not known."""

    cross_site_bytes: float | None = None
    """Bytes that all devices of a site send to other sites in a step; None with one site."""

    @classmethod
    def of(cls, config: RunConfig, plan: StepPlan, sent: float | None) -> Self:
        """Return the facts of a run whose step has a `plan` on the mesh of one or of all sites.

        Args:
            config: the run.
            plan: its step.
            sent: bytes that a site sends to others in a step; None with one site.
        """
        mesh, sequence = plan.mesh, config.batch.sequence_length
        accelerator = accelerator_of(mesh.devices.flat[0])
        peak = accelerator and accelerator.peak(plan.policy.compute_dtype.name)
        devices = mesh.devices.size // mesh.shape["dc"] * config.mesh.dc
        return cls(
            tokens_per_step=config.batch.global_batch_size * sequence,
            flops_per_token=model_flops(config.model, sequence),
            peak_flops=peak * devices if peak else None,
            cross_site_bytes=sent,
        )

    def model_flops_utilization(self, tokens_per_second: float) -> float | None:
        """Return the share of the peak that goes into the model; None without a known peak."""
        if not self.peak_flops:
            return None
        return self.flops_per_token * tokens_per_second / self.peak_flops


class Trainer(Protocol[State]):
    """One way to run a config: on one mesh over all sites, say.

    All processes of a run call its methods together and in the same order.
    """

    @property
    def facts(self) -> TrainerFacts:
        """Facts for the log."""
        ...

    def initial_state(self, weights: HuggingFaceWeights | None = None) -> State:
        """Return the state before the first step; `weights` take the place of random ones."""
        ...

    def step(
        self, state: State, batch: Batch, requests: Mapping[str, bool]
    ) -> tuple[State, Mapping[str, Any]]:
        """Start a step; it may still run when this returns.

        Args:
            state: donated, and not to be used again.
            batch: this process's sequences.
            requests: True where this process asks all processes to "stop" or to "save".

        Returns:
            The next state and the step's metrics: scalars, the same on every process, with the
            number of processes that ask for each of the requests.
        """
        ...

    def link_traffic(self) -> Mapping[str, LinkTraffic]:
        """Return the traffic of the last step with each other site, by name.

        Nothing in one program over all sites, whose messages the host does not see.
        """
        ...

    def measured_links(self) -> Mapping[str, MeasuredLink]:
        """Return what was measured of the link to each other site since the last call, by name.

        In one program over all sites the first process knows the round trips of the heartbeats.
        """
        ...

    def replanned(self, step: Step) -> Self | None:
        """Compile another step of the same run and mesh; None: its program is this one's."""
        ...

    def adopt(self, state: State) -> State:
        """Return the state of a trainer that this one was planned anew from."""
        ...

    def link_lines(self) -> list[str]:
        """Return what the log says of the messages between sites."""
        ...

    def evaluate(self, state: State, batch: Batch) -> Any:
        """Return [sum of losses, number of targets] of a batch, the same on every process."""
        ...

    def save(
        self, checkpointer: Checkpointer, step: int, state: State, metadata: Mapping[str, Any]
    ) -> None:
        """Save the state as the checkpoint of `step`, in the background."""
        ...

    def restore(
        self,
        checkpointer: Checkpointer,
        model: Mapping[str, Any],
        frozen: HuggingFaceWeights | None = None,
    ) -> tuple[State, dict[str, Any]]:
        """Return the state of the newest checkpoint and the metadata that it was saved with.

        Args:
            checkpointer: the run's checkpoints.
            model: the model's config, which must be that of the checkpoint.
            frozen: the weights that adapters adapt, which no checkpoint holds; None: the run has
                none.

        Raises:
            UserError: there is no checkpoint, or not of this model.
        """
        ...
