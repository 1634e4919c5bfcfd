"""The question that a search answers: a model, a topology, a batch, and what may be chosen."""

import dataclasses
import math
import os
from typing import get_args

from geojax.accelerators import Accelerator
from geojax.collectives import WireName
from geojax.errors import UserError
from geojax.mesh import DcRole, Join
from geojax.models import ModelConfig
from geojax.models.chunk.remat import Remat
from geojax.optim import OptimizerSettings
from geojax.precision import PrecisionName, policy
from geojax.runtime.device_memory import usable_memory
from geojax.topology import Site, Topology

REMATS: tuple[Remat, ...] = get_args(Remat)
"""Policies of remat, those that compute least again first."""


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """A model to be trained on all accelerators of a topology, and the choices that are open."""

    model: ModelConfig
    topology: Topology
    """Sites of equal size, and the links between them."""
    global_batch_size: int
    """Sequences of a step."""
    sequence_length: int
    """Tokens of a sequence."""
    roles: tuple[DcRole, ...] = ("data", "stage")
    """Roles of the sites to choose from."""
    joins: tuple[Join, ...] = ("one_program",)
    """Ways to join the sites to choose from."""
    precisions: tuple[PrecisionName, ...] = ("bf16",)
    """Precisions to choose from, all of which the user takes for good enough."""
    compressions: tuple[WireName, ...] = ("none",)
    """Formats of gradients on the link to choose from, with the same proviso."""
    remats: tuple[Remat, ...] = REMATS
    """Policies of remat to choose from, those that compute least again first."""
    optimizer: OptimizerSettings = dataclasses.field(default_factory=OptimizerSettings)
    """Optimizer, whose state takes memory."""
    memory_bytes: float | None = None
    """Memory of an accelerator that a step may fill; None: the usable part of the topology's."""

    def __post_init__(self) -> None:
        require_as_many(self.topology)
        if len(self.kinds) > 1 and self.joins != ("islands",):
            raise UserError(
                f"topology '{self.topology.name}': one program cannot run on "
                f"{' and '.join(self.kinds)}; sites with runtimes of their own would work: "
                "--joins islands"
            )
        for name in ("roles", "joins", "precisions", "compressions"):
            if not getattr(self, name):
                raise UserError(f"{name}: a plan needs one to choose from; name one or more")
        for name in self.precisions:
            policy(name)  # refuses a precision that there is not
        if self.sequence_length > self.model.max_position_embeddings:
            raise UserError(
                f"sequence_length {self.sequence_length} is longer than the model's "
                f"max_position_embeddings {self.model.max_position_embeddings}; "
                f"{self.model.max_position_embeddings} would do"
            )
        for first, second in zip(self.topology.sites, self.topology.sites[1:], strict=False):
            self.topology.link(first.name, second.name)  # refuses a link that is not described

    @property
    def site(self) -> Site:
        """Any of the sites, which have as many hosts and accelerators each."""
        return self.topology.sites[0]

    @property
    def sites(self) -> int:
        """Number of sites."""
        return len(self.topology.sites)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the accelerators, each once."""
        return tuple(dict.fromkeys(site.accelerator.name for site in self.topology.sites))

    @property
    def accelerator(self) -> Accelerator:
        """Accelerator with the least memory."""
        accelerators = [site.accelerator for site in self.topology.sites]
        return min(accelerators, key=lambda each: each.memory_bytes or math.inf)

    @property
    def usable_bytes(self) -> float:
        """Memory of an accelerator that a step may fill; infinite where it is not known."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        usable = usable_memory(self.accelerator, os.environ)
        return math.inf if usable is None else usable.bytes


def require_as_many(topology: Topology) -> None:
    """Refuse sites that differ in number of hosts, or of accelerators in a host.

    Raises:
        UserError: they do; with the largest topology of equal sites that is in it.
    """
    sizes = {(site.hosts, site.accelerators_per_host) for site in topology.sites}
    if len(sizes) == 1:
        return
    shown = " and ".join(
        f"'{site.name}' {site.accelerators} {site.accelerator.name}" for site in topology.sites
    )
    fewest = min(hosts for hosts, _ in sizes)
    if len({each for _, each in sizes}) == 1:
        would = f"{fewest} hosts in each site (hosts: {fewest})"
    else:
        largest = max(topology.sites, key=lambda site: site.accelerators)
        would = f"hosts of one size, or '{largest.name}' alone,"
    raise UserError(
        f"topology '{topology.name}': the sites differ ({shown}), and a plan needs as many "
        f"accelerators in each; {would} would work"
    )
