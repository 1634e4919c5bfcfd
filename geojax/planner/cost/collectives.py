"""Time of the collectives of a layer: over `tensor`, `context` and `expert`.

Their bytes are those of `geojax.planner.traffic`, which a test holds to traced programs.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

from geojax.models import AnyModel, ModelConfig, OwnModel
from geojax.models.chunk.remat import Remat
from geojax.models.parallel.parallelism import Parallelism
from geojax.planner.cost.layer import LayerTimes, Piece
from geojax.planner.cost.networks import SiteNetworks
from geojax.planner.cost.own_layer import layer_of_rank
from geojax.planner.cost.tensor_overlap import Beside, beside_products, joint_share
from geojax.planner.traffic.context import predicted_context_bytes
from geojax.planner.traffic.moe import predicted_expert_bytes
from geojax.planner.traffic.tensor import predicted_tensor_bytes
from geojax.precision import policy
from geojax.runtime.platform import GPU

_REGIONS = 2
"""Pairs of collectives over `tensor` in a layer's forward."""


def layer_collectives(
    times: LayerTimes, networks: SiteNetworks, attention: Piece
) -> Iterator[Piece]:
    """Yield the messages of one layer; those of a ring over `context` run beside `attention`."""
    if isinstance(times.model, OwnModel):
        yield from _of_own_layer(times.model, times, networks)
        return
    if times.layout.mesh.tensor > 1:
        yield _tensor(times, networks, layers=1)
    if times.layout.mesh.context > 1:
        yield _context(times, networks, attention)
    if times.model.is_moe and times.layout.mesh.expert > 1:
        yield _experts(times, networks)


def _of_own_layer(model: OwnModel, times: LayerTimes, networks: SiteNetworks) -> Iterator[Piece]:
    """Time the collectives of your own modules, none of them beside other work."""
    for axes, sent in layer_of_rank(model, times.layout).messages.items():
        network = networks.group(axes)
        yield Piece(
            f"{' x '.join(axes)} collectives",
            "traced bytes over the network's bandwidth (geojax.planner.cost.own_layer)",
            network.seconds(sent.forward_bytes, sent.forward),
            network.seconds(sent.backward_bytes, sent.backward),
            bytes=sent.forward_bytes + sent.backward_bytes,
            messages=(sent.forward + sent.backward) * network.steps,
            network=network.network,
        )


def later_experts(times: LayerTimes, networks: SiteNetworks) -> Iterator[Piece]:
    """Yield the messages over `expert` of the modules for later tokens."""
    modules = times.model.num_nextn_predict_layers
    if modules and times.model.is_moe and times.layout.mesh.expert > 1:
        yield _experts(times.computed_again, networks).times(modules)


def end_collectives(times: LayerTimes, networks: SiteNetworks) -> Piece:
    """Return the messages over `tensor` of embedding and head together."""
    return _tensor(times, networks, layers=0)


def shared_stream(times: LayerTimes, networks: SiteNetworks, of: str) -> Piece:
    """Return the messages of embedding or head that stages share: a stream, and its cotangent.

    Where they share positions, the one is scattered and the other gathered; where they share the
    vocabulary, each is summed.
    """
    network = networks.group(("stage",))
    stream = times.own_tokens * times.model.hidden_size * times.itemsize
    messages = 2 if times.layout.shares_vocabulary else 1
    sent = messages * stream * (1 - 1 / network.ranks)
    took = network.seconds(sent, messages)
    return Piece(
        f"stream of the {of}",
        "bytes of the residual stream over the network's bandwidth",
        took,
        took,
        bytes=2 * sent,
        messages=2 * messages * network.steps,
        network=network.network,
    )


def shared_softmax(times: LayerTimes, networks: SiteNetworks) -> Piece:
    """Return the sums over all ranks that share the vocabulary: three numbers of each token."""
    network = networks.group(("stage", "tensor"))
    tokens, _ = times.logits
    sent = 2 * 3 * 4 * tokens * (1 - 1 / network.ranks)
    return Piece(
        "softmax of the head",
        "bytes of two sums over the network's bandwidth, and their latency",
        network.seconds(sent, 2),
        bytes=sent,
        messages=2 * network.steps,
        network=network.network,
    )


def _tensor(times: LayerTimes, networks: SiteNetworks, *, layers: int) -> Piece:
    """Time the copies to and reductions from the ranks of `tensor`.

    Forwards each of two regions has an all-reduce, or a gather and a scatter of the same bytes;
    what the backward sends more is in `geojax.planner.traffic.tensor`. Pipelined collectives
    travel in t pieces beside their product and expose one (TransformerEngine's "comm+GEMM
    overlap"; Wang et al. 2023, "Overlap Communication with Dependent Computation").
    """
    made, joint = _tensor_passes(times, networks, layers), joint_share(times) if layers else 0.0
    exposed = [
        (1 - joint) * alone + joint * together
        for alone, together in zip(made.alone, made.together, strict=True)
    ]
    network = networks.group(("tensor",))
    return Piece(
        "tensor collectives",
        "predicted bytes over NVLink's bandwidth and steps of its ring "
        "(geojax.planner.traffic.tensor)",
        exposed[0],
        exposed[1],
        hidden=sum(made.seconds) - sum(exposed),
        bytes=made.bytes,
        messages=2 * made.messages * network.steps,
        network=network.network,
    )


class Apart(NamedTuple):
    """Seconds that a layer takes longer where its passes are not in joint ticks; 0 without any."""

    tick: float = 0.0
    """Seconds of a forward and a backward."""
    last_backwards: float = 0.0
    """Seconds of a backward beside which nothing goes forwards any more, above its mean."""

    @classmethod
    def of(cls, times: LayerTimes, networks: SiteNetworks) -> "Apart":
        """Time what the messages over `tensor` of a layer then expose."""
        if times.layout.mesh.tensor == 1 or not (joint := joint_share(times)):
            return NEVER_APART
        made = _tensor_passes(times, networks, 1)
        tick = sum(made.alone) - sum(made.together)
        return cls(tick, joint * (made.alone[1] - made.together[1]))


NEVER_APART = Apart()
"""The seconds of a layout that has no joint ticks."""


class _TensorPasses(NamedTuple):
    """Collectives over `tensor` of a layer, forwards and backwards, or of embedding and head."""

    bytes: float
    messages: int
    """Messages of a pass."""
    seconds: list[float]
    alone: list[float]
    """Seconds beside which nothing is computed, of a pass by itself."""
    together: list[float]
    """The same of a pass in one branch with the other one."""


def _tensor_passes(times: LayerTimes, networks: SiteNetworks, layers: int) -> _TensorPasses:
    layout, dtype = times.layout, policy(times.layout.precision).compute_dtype.name
    network = networks.group(("tensor",))
    size = layout.microbatch_size, int(times.layout.batch.sequence_length / layout.mesh.context)
    sent = _tensor_bytes(times.model, layout.model_parallelism, size, dtype, layout.remat, layers)
    plain = _tensor_bytes(times.model, layout.model_parallelism, size, dtype, "none", layers)
    forward, backward = plain / 2, sent - plain / 2
    messages = 2 * _REGIONS * times.chunks if layers else 2
    beside = beside_products(times, network, plain / (4 * _REGIONS)) if layers else Beside()
    pieces = layout.mesh.tensor if times.execution.pipelined_tensor else 1
    took = [network.seconds(each, messages) for each in (forward, backward)]
    alone = [took[0] / pieces - beside.forward, took[1] / pieces - beside.backward]
    first = network.seconds(plain / (4 * _REGIONS), 1)
    together = [0.0, min(alone[1], first)]
    return _TensorPasses(sent, messages, took, alone, together)


@functools.lru_cache(maxsize=1024)
def _tensor_bytes(
    model: AnyModel,
    parallelism: Parallelism,
    size: tuple[int, int],
    dtype: str,
    remat: Remat,
    layers: int,
) -> float:
    """Predict the bytes of one layer, or of what is in no layer."""
    if isinstance(model, OwnModel):
        return 0.0

    def of(count: int) -> float:
        return float(
            predicted_tensor_bytes(
                model.with_stacked_layers(count),
                parallelism,
                sequences=size[0],
                positions=size[1],
                dtype=dtype,
                remat=remat,
            )
        )

    return of(2) - of(1) if layers else 2 * of(1) - of(2)


def _context(times: LayerTimes, networks: SiteNetworks, attention: Piece) -> Piece:
    """Time attention's messages: blocks of a ring travel while the block before is attended to."""
    layout, model = times.layout, times.model
    assert isinstance(model, ModelConfig), "modules of your own send for themselves"
    network = networks.group(("context",))
    sent = predicted_context_bytes(
        layout.model_parallelism,
        sequences=layout.microbatch_size,
        sequence_length=times.layout.batch.sequence_length,
        heads=model.num_attention_heads // layout.mesh.tensor,
        kv_heads=max(model.num_key_value_heads // layout.mesh.tensor, 1),
        head_dim=model.head_dim,
        value_dim=model.v_head_dim,
        dtype=policy(layout.precision).compute_dtype,
        packed=True,
    )
    forward, backward = float(sent.forward), float(sent.backward)
    backward += forward if times.again("attention") else 0.0
    took = [network.seconds(forward), network.seconds(backward)]
    beside = [0.0, 0.0]
    if layout.parallelism.context_method == "ring":
        share = 1 - 1 / layout.mesh.context  # the first block needs no message
        beside = [share * attention.forward, share * attention.backward]
    exposed = [max(0.0, each - own) for each, own in zip(took, beside, strict=True)]
    return Piece(
        "context collectives",
        "predicted bytes over the network's bandwidth (geojax.planner.traffic.context); a ring's "
        "beside attention",
        exposed[0],
        exposed[1],
        hidden=sum(took) - sum(exposed),
        bytes=forward + backward,
        messages=2 * network.steps,
        network=network.network,
    )


def _experts(times: LayerTimes, networks: SiteNetworks) -> Piece:
    """Time dispatch and combine of the tokens, none of it beside other work."""
    layout, model = times.layout, times.model
    assert isinstance(model, ModelConfig), "modules of your own send for themselves"
    network = networks.group(("expert",))
    predicted = predicted_expert_bytes(
        model,
        layout.model_parallelism,
        sequences=layout.microbatch_size,
        positions=int(times.layout.batch.sequence_length / layout.mesh.context),
        dtype=policy(layout.precision).compute_dtype,
        remat=layout.remat,
        platform=GPU,
    )
    count = float(predicted)
    took = network.seconds(count, 4)
    return Piece(
        "expert all-to-alls",
        "predicted bytes over the network's bandwidth (geojax.planner.traffic.moe)",
        took / 2,
        took / 2,
        bytes=count,
        messages=4 * network.steps,
        network=network.network,
    )
