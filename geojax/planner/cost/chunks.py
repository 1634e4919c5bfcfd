"""Times of a pipeline's chunks, and of the hops between them, in the sites where they lie."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from geojax.models import AnyModel
from geojax.pipeline.balance import balanced_layers
from geojax.pipeline.schedule import Placement
from geojax.pipeline.simulation.costs import Costs, Hop
from geojax.pipeline.simulation.stage_times import PieceTimes, StageTimes
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.collectives import (
    NEVER_APART,
    Apart,
    end_collectives,
    later_experts,
    layer_collectives,
    shared_softmax,
    shared_stream,
)
from geojax.planner.cost.execution import Execution
from geojax.planner.cost.head_forms import open_head_forms
from geojax.planner.cost.layer import LayerTimes, Piece
from geojax.planner.cost.layer_bytes import layer_bytes
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.memory import held_parameters
from geojax.planner.cost.networks import SiteNetworks
from geojax.planner.cost.pipeline import ChosenBy
from geojax.planner.cost.tensor_overlap import joint_share, late_seconds, orders_collectives
from geojax.precision import policy
from geojax.runtime.platform import GPU, platform_of_accelerator
from geojax.topology import Topology

_CHUNKS = (2, 4)
"""Numbers of parts of the stream that are compared with one."""

_LEAST_GAIN = 0.01

SPLIT_SURCHARGE = 0.08
"""The share by which the halves of a split backward take longer than the whole, where it was not
measured: what the second half reads was written by the first, and less is fused. With it ZB-H1 in
CrossPipe's Table 5 (GH200) is 0.6% off in the median, and 3.8% without."""


@dataclasses.dataclass(frozen=True)
class SitePieces:
    """The work of one microbatch on a device of one site."""

    layer: tuple[Piece, ...]
    first: tuple[Piece, ...]
    """The work of the first chunk besides its layers."""
    last: tuple[Piece, ...]
    """The work of the last chunk besides its layers."""
    shared: tuple[Piece, ...]
    """The work of all stages together on a head that they share; none where the last has it."""
    head: str
    """The `pipeline.head` of the layout: what it gives, or leaves to "auto"."""
    hop: tuple[Piece, ...]
    """The messages of a chunk to its neighbors in the site; none where there is one stage."""
    networks: SiteNetworks
    split_surcharge: float = SPLIT_SURCHARGE
    """The share by which the halves of a split backward take longer than the whole."""
    apart: Apart = NEVER_APART
    """Seconds that a layer takes longer where its passes are not in joint ticks."""
    late: float = 0.0
    """Seconds of a layer's gradients of weights that joint ticks end with, beside their hops."""
    joint: bool = False
    """True if a stage's passes of one tick are one branch of the program."""
    tensor_chunks: int = 1
    """The `parallelism.chunks` of the layers: what the layout gives, or leaves to "auto"."""

    @property
    def hop_bytes(self) -> float:
        """Bytes of a message between stages that one device sends; 0 where there is one stage."""
        return sum(piece.bytes for piece in self.hop) / 2


def site_pieces(
    model: AnyModel,
    layout: LayoutCandidate,
    topology: Topology,
    calibration: Calibration,
    execution: Execution,
) -> tuple[SitePieces, ...]:
    """Return the work of a microbatch in each site of the topology."""
    layout = with_tensor_chunks(model, layout, topology, calibration, execution)
    first_form, *forms = open_head_forms(model, layout)
    layout, made = layout.changed(pipeline={"head": first_form}), list[SitePieces]()
    for index, site in enumerate(topology.sites):
        own = layout.of_site(index)
        times = LayerTimes(model, own, site, calibration, execution)
        networks = SiteNetworks(site, own.mesh_sizes, calibration)
        if calibration.stage_times is not None:
            made.append(_measured(times, networks, calibration.stage_times))
            continue
        work = tuple(times.layer())
        attention = next(piece for piece in work if piece.name == "attention")
        made.append(
            SitePieces(
                (*work, *layer_collectives(times, networks, attention)),
                *_ends(times, networks),
                first_form,
                _hops(times, networks),
                networks,
                apart=Apart.of(times, networks),
                late=late_seconds(times),
                joint=times.has_joint_ticks,
                tensor_chunks=layout.model_parallelism.chunks,
            )
        )
    if not _may_share_head(topology, calibration, execution):
        return tuple(made)

    def in_form(head: str) -> list[SitePieces]:
        shared, others = layout.changed(pipeline={"head": head}), []
        for site, pieces in zip(topology.sites, made, strict=True):
            times = LayerTimes(model, shared, site, calibration, execution)
            first, last, together = _ends(times, pieces.networks)
            others.append(
                dataclasses.replace(pieces, first=first, last=last, shared=together, head=head)
            )
        return others

    def seconds(sites: Sequence[SitePieces]) -> float:
        once = max(_once_seconds(model, layout, each) for each in sites)
        return _busiest_seconds(model, layout, sites) + once / layout.batch.microbatches

    tried = [(seconds(each), each) for each in (made, *map(in_form, forms))]
    enough = min(time for time, _ in tried) / (1 - _LEAST_GAIN)
    fast = [each for time, each in tried if time <= enough]
    # The vocabulary's shares hold least; positions hold what the last stage by itself would.
    holds_least = fast[-1][0].head == "vocabulary"
    return tuple(fast[-1] if holds_least else fast[0])


_Work = tuple[Piece, ...]


def _ends(times: LayerTimes, networks: SiteNetworks) -> tuple[_Work, _Work, _Work]:
    """Return the work besides layers: `first`, `last` and `shared` of `SitePieces`."""
    first, layout = (times.embedding(), *times.dense_layers()), times.layout
    ends = (end_collectives(times, networks),) if layout.mesh.tensor > 1 else ()
    if layout.head_shares == 1:
        last = (*times.head(), *times.later_tokens(), *ends, *later_experts(times, networks))
        return first, last, ()
    half = tuple(each.times(1 / 2) for each in ends)
    of_head = shared_stream(times, networks, "head")
    if layout.shares_vocabulary:
        of_embedding = shared_stream(times, networks, "embedding")
        sums = shared_softmax(times, networks)
        return (*first, *half, of_embedding), (), (*times.head(), *half, of_head, sums)
    of_share = (each.times(1 / layout.head_shares) for each in half)
    return (*first, *half), (), (*times.head(), *of_share, of_head)


def _may_share_head(topology: Topology, calibration: Calibration, execution: Execution) -> bool:
    """Return True if "auto" looks for stages that share the head."""
    on_gpus = all(platform_of_accelerator(site.accelerator) is GPU for site in topology.sites)
    return calibration.stage_times is None and execution.lock_step and on_gpus


def _busiest_seconds(
    model: AnyModel, layout: LayoutCandidate, sites: Sequence[SitePieces]
) -> float:
    """Time a microbatch on the busiest stage, and on all together."""
    placement, site_of = layout.placement, layout.site_of_stages
    own = [sites[site_of[stage]] for stage in placement.stage_of]
    layers = layout.pipeline.layers or _balanced(model.num_stacked_layers, own)
    seconds = [0.0] * placement.stages
    for stage, site, count in zip(placement.stage_of, own, layers, strict=True):
        seconds[stage] += count * _exposed(site.layer)
    seconds[placement.stage_of[0]] += _exposed(own[0].first)
    seconds[placement.stage_of[-1]] += _exposed(own[-1].last)
    return max(seconds) + _exposed(own[-1].shared)


def _once_seconds(model: AnyModel, layout: LayoutCandidate, site: SitePieces) -> float:
    """Time the weights and gradients of embedding and head in the site, once a step."""
    held = held_parameters(model, layout.changed(pipeline={"head": site.head}))
    dtypes, ranks = policy(layout.precision), site.networks.group(("data", "expert"))
    itemsizes = dtypes.compute_dtype.itemsize + dtypes.reduce_dtype.itemsize
    return ranks.seconds(itemsizes * (held.tables + held.head) * (1 - 1 / ranks.ranks))


def with_tensor_chunks(
    model: AnyModel,
    layout: LayoutCandidate,
    topology: Topology,
    calibration: Calibration,
    execution: Execution,
) -> LayoutCandidate:
    """Return the layout with the `parallelism.chunks` that it leaves to "auto", if it is not 1.

    More parts must save a layer `_LEAST_GAIN` of its time.
    """
    positions = layout.batch.sequence_length // (layout.mesh.context * layout.mesh.tensor)
    times = LayerTimes(model, layout, topology.sites[0], calibration, execution)
    if (
        layout.parallelism.chunks != "auto"
        or layout.mesh.tensor == 1
        or calibration.stage_times is not None
        or policy(layout.precision).recipe is not None
        or not orders_collectives(times)
        or joint_share(times) > 0
    ):
        return layout
    networks = SiteNetworks(times.site, layout.of_site(0).mesh_sizes, calibration)

    def in_parts(chunks: int) -> tuple[float, LayoutCandidate]:
        made = layout.changed(parallelism={"chunks": chunks})
        own = dataclasses.replace(times, layout=made)
        work = tuple(own.layer())
        attention = next(piece for piece in work if piece.name == "attention")
        pieces = (*work, *layer_collectives(own, networks, attention))
        return sum(piece.exposed for piece in pieces), made

    tried = [in_parts(chunks) for chunks in (1, *_CHUNKS) if positions % chunks == 0]
    least, best = min(tried, key=lambda found: found[0])
    return best if least <= (1 - _LEAST_GAIN) * tried[0][0] else layout


def _measured(times: LayerTimes, networks: SiteNetworks, measured: StageTimes) -> SitePieces:
    """Return the work of a microbatch as it was measured, messages of `tensor` and so on included.

    Raises:
        UserError: it was measured for another model, microbatch or parallelism.
    """
    layout = times.layout
    measured.require(
        model=times.model,
        sequences=layout.microbatch_size,
        sequence_length=times.layout.batch.sequence_length,
        dtype=times.compute_dtype,
        remat=layout.remat,
        parallelism=layout.model_parallelism,
    )
    split = measured.of_site(times.site.name)
    own = split.with_whole_backward

    def piece(name: str, of: PieceTimes) -> tuple[Piece]:
        return (Piece(f"{name} (measured)", "geojax probe --stage-times", *of.kinds),)

    layer, embedding = piece("layers", own.layer), piece("embedding", own.embedding)
    return SitePieces(
        layer,
        embedding,
        piece("head", own.head),
        (),
        layout.pipeline.head,
        _hops(times, networks),
        networks,
        split.split_surcharge,
    )


def _hops(times: LayerTimes, networks: SiteNetworks) -> tuple[Piece, ...]:
    """Time the messages of one chunk to its neighbors: one forwards, one backwards."""
    if times.layout.pipeline_stages == 1:
        return ()
    network, sent = networks.hop(), times.own_tokens * times.model.hidden_size * times.itemsize
    took = sent / network.bytes_per_second + network.latency_seconds
    return (
        Piece(
            "hops inside the site",
            "bytes of the residual stream over the network's bandwidth, and its latency; what "
            "stages wait for is in the bubble",
            hidden=2 * took,
            bytes=2 * sent,
            messages=2,
            network=network.network,
        ),
    )


@dataclasses.dataclass(frozen=True)
class ChunkWork:
    """One microbatch's work in every chunk of a pipeline."""

    placement: Placement
    layers: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    """Work of each chunk: its layers, and what it does besides."""
    shared: tuple[Piece, ...]
    """Work of all stages together on a head that they share."""
    costs: Costs
    chosen_by: ChosenBy
    """Figures by which the program chooses its ticks, or its order of work."""

    @property
    def busiest(self) -> list[Piece]:
        """Return the pieces of the stage that works longest, of its chunks and shares together."""
        by_stage = [
            [piece for chunk in self.placement.chunks_of(stage) for piece in self.pieces[chunk]]
            for stage in range(self.placement.stages)
        ]
        busiest = max(by_stage, key=lambda pieces: sum(piece.exposed for piece in pieces))
        return [*busiest, *self.shared]


def chunk_work(
    model: AnyModel,
    layout: LayoutCandidate,
    topology: Topology,
    sites: Sequence[SitePieces],
    *,
    looks_at_memory: bool = True,
) -> ChunkWork:
    """Cut the model into the chunks of a layout, and time each.

    Args:
        model: the model.
        layout: its layout.
        topology: the sites.
        sites: the work in each site that one pipeline runs through.
        looks_at_memory: the program chooses its ticks by what its layers hold.

    Raises:
        UserError: there are more chunks than layers, or the topology lacks a link.
    """
    layers = layout.pipeline.layers
    work = placed_work(model, layout, topology, sites, layout.placement, layers)
    if looks_at_memory and layout.pipeline_stages > 1 and layout.site_shares is None:
        layer = layer_bytes(model, layout)
        chosen_by = work.chosen_by._replace(layers=work.layers, layer=layer)
        return dataclasses.replace(work, chosen_by=chosen_by)
    return work


def placed_work(
    model: AnyModel,
    layout: LayoutCandidate,
    topology: Topology,
    sites: Sequence[SitePieces],
    placement: Placement,
    layers: Sequence[int] | None,
) -> ChunkWork:
    """Time chunks on the stages of a placement; errors as `chunk_work`.

    Args:
        model: the model.
        layout: its stages.
        topology: the sites.
        sites: the work in each site that one pipeline runs through.
        placement: the stage of each chunk.
        layers: layers of each chunk; None: those of the fastest slowest stage.
    """
    site_of = layout.site_of_stages
    own = [sites[site_of[stage]] for stage in placement.stage_of]
    layers = tuple(layers or _balanced(model.num_stacked_layers, own))
    pieces = [
        [piece.times(count) for piece in site.layer]
        for count, site in zip(layers, own, strict=True)
    ]
    pieces[0] += own[0].first
    pieces[-1] += own[-1].last
    for chunk, site in zip(pieces, own, strict=True):
        chunk += site.hop
    hops = tuple(
        _hop(layout, topology, sites, site_of[a], site_of[b], a == b)
        for a, b in itertools.pairwise(placement.stage_of)
    )
    costs = Costs(
        tuple(_sum(chunk, "forward") for chunk in pieces),
        tuple(_sum(chunk, "backward") for chunk in pieces),
        tuple(_sum(chunk, "weight") for chunk in pieces),
        hops,
        split_surcharge=max(site.split_surcharge for site in own),
        head=_exposed(own[-1].shared),
        apart=max(site.apart.tick for site in own),
        late=min(site.late for site in own),
    )
    shared, of_chunks = own[-1].shared, tuple(map(tuple, pieces))
    return ChunkWork(
        placement, layers, of_chunks, shared, costs, ChosenBy(costs, joint=own[0].joint)
    )


def _sum(pieces: Iterable[Piece], kind: str) -> float:
    return sum(getattr(piece, kind) for piece in pieces)


def _exposed(pieces: Iterable[Piece]) -> float:
    return sum(piece.exposed for piece in pieces)


def _balanced(layers: int, own: Sequence[SitePieces]) -> tuple[int, ...]:
    """Deal out layers so that the slowest stage is fastest."""
    if layers == len(own):
        return (1,) * layers
    seconds = [_exposed(site.layer) for site in own]
    return balanced_layers(
        [1.0] * layers,
        len(own),
        before=_exposed(own[0].first) / seconds[0],
        after=_exposed(own[-1].last) / seconds[-1],
        speeds=[1 / each for each in seconds],
    )


def _hop(
    layout: LayoutCandidate,
    topology: Topology,
    sites: Sequence[SitePieces],
    source: int,
    target: int,
    same_stage: bool,
) -> Hop:
    """Return the message between two chunks: over a link, over a site's network, or none."""
    if same_stage:
        return Hop()
    if source == target:
        (piece,) = sites[source].hop
        return Hop(piece.hidden / 2)
    # Both ways share the link, and its name.
    names = tuple(topology.site_names[site] for site in sorted((source, target)))
    there, back = topology.link(*names), topology.link(*reversed(names))
    senders = layout.devices_per_stage
    cards = senders * sites[source].networks.hop().bytes_per_second
    bandwidth = min(there.bytes_per_second, back.bytes_per_second, cards)
    return Hop(
        there.round_trip_seconds / 2,
        senders * sites[source].hop_bytes / bandwidth,
        f"{names[0]}-{names[1]}",
    )
