"""A model cut into stages that lie in the sites of a topology: what each chunk and each hop costs.

Times were measured (see `stage_times`), or come from operations (see `model_costs`) and the
accelerators' peaks. What keeps an accelerator from its peak
(memory, collectives over tensor and context, the host) is one number then, the efficiency.
"""

import dataclasses
import itertools

import jax.numpy as jnp

from geojax.errors import UserError
from geojax.models.chunk.remat import Remat
from geojax.models.config import ModelConfig
from geojax.models.flops import model_flops
from geojax.models.parallel.parallelism import SINGLE_DEVICE, Parallelism
from geojax.pipeline.balance import balanced_layers
from geojax.pipeline.schedule import Placement
from geojax.pipeline.simulation.costs import Costs, Hop
from geojax.pipeline.simulation.model_costs import (
    Operations,
    first_operations,
    head_operations,
    layer_operations,
)
from geojax.pipeline.simulation.stage_times import PieceTimes, SiteTimes, StageTimes
from geojax.topology import Link, Site, Topology

EFFICIENCY = 0.5
"""The share of its peak that an accelerator reaches while it works on a microbatch. Published bf16
runs of 70B to 340B on H100, whose times include the bubble and the rest of the step, come to 0.41
to 0.55 of the peak."""

SPLIT_SURCHARGE = 0.08
"""The share by which the halves of a split backward take longer than the whole, where it was not
measured: what the second half reads was written by the first, and less is fused. With it ZB-H1 in
CrossPipe's Table 5 (GH200) is 0.6% off in the median, and 3.8% without."""


@dataclasses.dataclass(frozen=True)
class StagedModel:
    """One microbatch of a run on a pipeline through all sites of a topology, in their order."""

    model: ModelConfig
    topology: Topology
    stages_per_site: int
    sequences: int
    """Sequences of a microbatch on one data-parallel rank."""
    sequence_length: int
    """Tokens of a sequence."""
    data: int = 1
    """Ranks of each stage that have sequences of their own; they share the links between sites."""
    parallelism: Parallelism = SINGLE_DEVICE
    """The parallelism of a stage over the rest of its devices; its `expert` ranks
    are among `data`."""
    dtype: str = "bfloat16"
    """The dtype of activations and matrix products."""
    remat: Remat = "none"
    efficiency: float = EFFICIENCY
    stage_seconds: float | None = None
    """If it was measured: forward and backward of a microbatch on the slowest stage, with one chunk
    a stage. Peaks then matter only where sites differ, and the efficiency not at all."""

    measured: StageTimes | None = None
    """Measured times of the pieces on every site; peaks and efficiency do not matter then."""

    given_layers: tuple[int, ...] | None = None
    """Layers of each chunk, for placements of so many chunks; others are balanced by cost."""

    def __post_init__(self) -> None:
        for site in self.topology.sites:
            if self.stages_per_site * self.devices > site.accelerators:
                raise UserError(
                    f"{self.stages_per_site} stages of {self.devices} devices each need "
                    f"{self.stages_per_site * self.devices} accelerators, and site '{site.name}' "
                    f"of topology '{self.topology.name}' has {site.accelerators}"
                )
        if self.measured is not None:
            self.measured.require(
                model=self.model,
                sequences=self.sequences,
                sequence_length=self.sequence_length,
                dtype=self.dtype,
                remat=self.remat,
                parallelism=self.parallelism,
            )

    @property
    def devices(self) -> int:
        """The number of devices of one stage."""
        return self.data * self.parallelism.tensor * self.parallelism.context

    @property
    def stages(self) -> int:
        """The number of stages of the whole pipeline."""
        return self.stages_per_site * len(self.topology.sites)

    @property
    def site_of(self) -> tuple[str, ...]:
        """The name of each stage's site."""
        return tuple(self._site(stage).name for stage in range(self.stages))

    @property
    def microbatch_tokens(self) -> int:
        """The tokens of a microbatch on all ranks of a stage."""
        return self.sequences * self.data * self.sequence_length

    def model_flops_utilization(self, tokens_per_second: float) -> float | None:
        """Return the MFU at so many tokens of this pipeline a second; None where a peak is unknown.

        All devices of all stages count, as in the figures that a training run logs.
        """
        peaks = [site.accelerator.peak(self.dtype) for site in self.topology.sites]
        known = [peak for peak in peaks if peak is not None]
        if len(known) < len(peaks):
            return None
        flops = tokens_per_second * model_flops(self.model, self.sequence_length)
        return flops / (sum(known) * self.stages_per_site * self.devices)

    @property
    def hop_bytes(self) -> int:
        """The bytes that all ranks of a stage send to the next one for a microbatch.

        Each rank of `tensor` sends its copy of the residual stream, or with sequence parallelism
        its part of it.
        """
        itemsize = jnp.dtype(self.dtype).itemsize
        once = self.microbatch_tokens * self.model.hidden_size * itemsize
        return once if self.parallelism.sequence else once * self.parallelism.tensor

    def layers(self, placement: Placement) -> tuple[int, ...]:
        """Return the given layers of each chunk, or those of the fastest slowest stage.

        Raises:
            UserError: there are more chunks than layers, or a site's peak is unknown.
        """
        if self.given_layers is not None and len(self.given_layers) == placement.chunks:
            return self.given_layers
        pieces = [self._pieces(stage) for stage in placement.stage_of]
        layers = [sum(of_stage.layer.kinds) for of_stage in pieces]
        return balanced_layers(
            [1.0] * self.model.num_stacked_layers,
            placement.chunks,
            before=sum(pieces[0].embedding.kinds) / layers[0],
            after=sum(pieces[-1].head.kinds) / layers[-1],
            speeds=[1 / seconds for seconds in layers],
        )

    def costs(self, placement: Placement) -> Costs:
        """Return the times of a microbatch with its chunks on the stages of `placement`.

        Raises:
            UserError: there are more chunks than layers, a site's peak is unknown, or the topology
                says nothing of a link that the pipeline crosses.
        """
        costs = self._costs(placement)
        if self.stage_seconds is None:
            return costs
        plain = self._costs(Placement.linear(self.stages))
        work = zip(plain.forward, plain.backward, plain.weight, strict=True)
        factor = self.stage_seconds / max(map(sum, work))
        forward, backward, weight = (
            tuple(factor * seconds for seconds in of_chunks)
            for of_chunks in (costs.forward, costs.backward, costs.weight)
        )
        return dataclasses.replace(costs, forward=forward, backward=backward, weight=weight)

    @property
    def _split_surcharge(self) -> float:
        """The surcharge of a split backward, on the site where it is highest."""
        if self.measured is None:
            return SPLIT_SURCHARGE
        return max(self.measured.of_site(name).split_surcharge for name in set(self.site_of))

    def _costs(self, placement: Placement) -> Costs:
        pieces = [self._pieces(stage) for stage in placement.stage_of]
        times = [
            [count * seconds for seconds in of_stage.layer.kinds]
            for count, of_stage in zip(self.layers(placement), pieces, strict=True)
        ]
        times[0] = [sum(pair) for pair in zip(times[0], pieces[0].embedding.kinds, strict=True)]
        times[-1] = [sum(pair) for pair in zip(times[-1], pieces[-1].head.kinds, strict=True)]
        forward, backward, weight = map(tuple, zip(*times, strict=True))
        pairs = itertools.pairwise(placement.stage_of)
        hops = tuple(self._hop(*pair) for pair in pairs)
        return Costs(forward, backward, weight, hops, split_surcharge=self._split_surcharge)

    def _pieces(self, stage: int) -> SiteTimes:
        """Return the times of the pieces on the devices of a stage."""
        site = self._site(stage)
        if self.measured is not None:
            return self.measured.of_site(site.name).with_whole_backward
        seconds = self._tokens / self._rate(stage)
        look_up, scatter = self._embedding_seconds
        layer = layer_operations(self.model, self.sequence_length, self.remat)

        def times(operations: Operations) -> PieceTimes:
            # Not validated: without a topology's peaks they are operations, beyond any seconds.
            forward, backward, weight = (seconds * number for number in operations)
            return PieceTimes.model_construct(forward=forward, backward=backward, weight=weight)

        first = times(first_operations(self.model, self.sequence_length))
        return SiteTimes.model_construct(
            name=site.name,
            layer=times(layer),
            embedding=PieceTimes.model_construct(
                forward=look_up + first.forward,
                backward=first.backward,
                weight=scatter + first.weight,
            ),
            head=times(head_operations(self.model, self.sequence_length)),
        )

    @property
    def _tokens(self) -> float:
        """Whose operations one device computes alone, or which shared by several make as many."""
        return (
            self.sequences
            * self.sequence_length
            / (self.parallelism.tensor * self.parallelism.context)
        )

    @property
    def _embedding_seconds(self) -> tuple[float, float]:
        """Time the look-up (read and write rows) and its gradient (read and add rows), by the
        bandwidth of the memory; nothing where that is not known."""
        bandwidth = self._site(0).accelerator.memory_bytes_per_second
        if bandwidth is None:
            return 0.0, 0.0
        columns = self.sequences * self.sequence_length / self.parallelism.context
        row_bytes = self.model.hidden_size * jnp.dtype(self.dtype).itemsize
        return 2 * columns * row_bytes / bandwidth, 3 * columns * row_bytes / bandwidth

    def _site(self, stage: int) -> Site:
        return self.topology.sites[stage // self.stages_per_site]

    def _rate(self, stage: int) -> float:
        """Operations per second of one device of a stage."""
        site = self._site(stage)
        peak = site.accelerator.peak(self.dtype)
        if peak is not None:
            return peak * self.efficiency
        names = {other.accelerator.name for other in self.topology.sites}
        if self.stage_seconds is not None and len(names) == 1:
            return 1.0  # only proportions matter
        raise UserError(
            f"the {self.dtype} peak of accelerator '{site.accelerator.name}' of site "
            f"'{site.name}' is unknown. Name another accelerator (--accelerator h100-sxm), or give "
            "a stage's measured time (--stage-seconds 20ms)"
        )

    def _hop(self, source: int, target: int) -> Hop:
        if source == target:
            return Hop()
        first, second = (self._site(stage) for stage in sorted((source, target)))
        if first == second:
            link = self._inside(first, source, target)
            if link is None:
                return Hop()
            share = self.hop_bytes / self.devices  # every device has a link of its own
            return Hop(link.round_trip_seconds / 2, share / link.bytes_per_second)
        there = self.topology.link(first.name, second.name)
        back = self.topology.link(second.name, first.name)
        bandwidth = min(there.bytes_per_second, back.bytes_per_second)
        return Hop(
            there.round_trip_seconds / 2,
            self.hop_bytes / bandwidth,
            f"{first.name}-{second.name}",
        )

    def _inside(self, site: Site, source: int, target: int) -> Link | None:
        """Return the network of a device towards its peer in another stage of the same site; of
        the two networks the slower one, if only some have their peer in the same host."""

        def host(stage: int, device: int) -> int:
            place = stage % self.stages_per_site * self.devices + device
            return place // site.accelerators_per_host

        together = all(
            host(source, device) == host(target, device) for device in range(self.devices)
        )
        return site.inside_host if together else site.between_hosts
