"""The question that a search answers: a model, a topology, a batch, and what may be chosen."""

import dataclasses
import math
import os
from typing import get_args

from geojax.accelerators import Accelerator
from geojax.errors import UserError
from geojax.layout_names import Join
from geojax.models import AnyModel
from geojax.models.chunk.remat import Remat
from geojax.optim import OptimizerSettings
from geojax.planner.cost.adapters import refuse_adapters
from geojax.planner.search.choices import OpenChoices
from geojax.precision import policy
from geojax.runtime.device_memory import usable_memory
from geojax.topology import Site, Topology

REMATS: tuple[Remat, ...] = get_args(Remat)
"""Policies of remat, those that compute least again first."""


@dataclasses.dataclass(frozen=True)
class PlanRequest(OpenChoices):
    """A model to be trained on all accelerators of a topology, and the choices that are open."""

    model: AnyModel
    topology: Topology
    """Sites, and the links between them."""
    global_batch_size: int
    """Sequences of a step."""
    sequence_length: int
    """Tokens of a sequence."""
    remats: tuple[Remat, ...] = REMATS
    """Policies of remat to choose from, those that compute least again first."""
    optimizer: OptimizerSettings = dataclasses.field(default_factory=OptimizerSettings)
    """Optimizer, whose state takes memory."""
    memory_bytes: float | None = None
    """Memory of an accelerator that a step may fill; None: the usable part of the topology's."""
    memory_factor: float = 1.0
    """Factor by which a step may fill more."""

    def __post_init__(self) -> None:
        refuse_adapters(self.model)
        if "one_program" in self.joins:
            require_alike(self.topology)
        for name in ("roles", "joins", "precisions", "compressions"):
            if not getattr(self, name):
                raise UserError(f"{name}: a plan needs one to choose from; name one or more")
        for name in self.precisions:
            policy(name)  # refuses a precision that there is not
        if "int8" in self.compressions and self.model.use_router_bias:
            raise UserError(
                "compressions: int8 requires a model with use_router_bias=false, since counts of "
                "experts' tokens would share the scales of gradients; none and bf16 would do"
            )
        if self.sequence_length > self.model.max_position_embeddings:
            raise UserError(
                f"sequence_length {self.sequence_length} is longer than the model's "
                f"max_position_embeddings {self.model.max_position_embeddings}; "
                f"{self.model.max_position_embeddings} would do"
            )
        for first, second in zip(self.topology.sites, self.topology.sites[1:], strict=False):
            self.topology.link(first.name, second.name)  # refuses a link that is not described

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
    def has_unlike_accelerators(self) -> bool:
        """True if accelerators of some sites differ from those of others in any figure."""
        first, *others = (site.accelerator for site in self.topology.sites)
        return any(accelerator != first for accelerator in others)

    @property
    def common_accelerators(self) -> int:
        """Most accelerators that divide those of every site; with as many in each, a site's."""
        return math.gcd(*(site.accelerators for site in self.topology.sites))

    @property
    def common_accelerators_per_host(self) -> int:
        """Most accelerators that divide those of every site's hosts."""
        return math.gcd(*(site.accelerators_per_host for site in self.topology.sites))

    @property
    def usable_bytes(self) -> float:
        """Memory of the smallest accelerator that a step may fill; infinite where unknown."""
        return min(map(self.usable_bytes_in, self.topology.sites))

    def usable_bytes_in(self, site: Site) -> float:
        """Return the memory of a site's accelerators that a step may fill, or infinity."""
        if self.memory_bytes is not None:
            return self.memory_factor * self.memory_bytes
        usable = usable_memory(site.accelerator, os.environ)
        # Of an accelerator with less than a runtime takes nothing is left: a byte, to compare by.
        return math.inf if usable is None else self.memory_factor * max(usable.bytes, 1)


def require_alike(topology: Topology) -> None:
    """Refuse sites that one program cannot span: of other accelerators, or of other numbers.

    Raises:
        UserError: they differ; with what would work.
    """
    if are_alike(topology):
        return
    shown = " and ".join(
        f"'{site.name}' {site.accelerators} {site.accelerator.name}" for site in topology.sites
    )
    raise UserError(
        f"topology '{topology.name}': the sites differ ({shown}), but one program needs equal "
        "sites. Islands, which have a runtime for each site, would work: --joins islands"
    )


def are_alike(topology: Topology) -> bool:
    """Return True if all sites have as many hosts of as many accelerators of one kind."""
    kinds = {
        (site.hosts, site.accelerators_per_host, site.accelerator.name) for site in topology.sites
    }
    return len(kinds) == 1


def joins_of(topology: Topology) -> tuple[Join, ...]:
    """Return the way to join sites where none is named: runtimes of their own if they differ."""
    return ("one_program",) if are_alike(topology) else ("islands",)
