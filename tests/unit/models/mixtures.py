"""Small MoE models of every kind, their parameters, and layouts of the block alone."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from support.small_models import drawn_parameters

from geojax.collectives.axes import to_varying
from geojax.models import ModelConfig, parameter_shapes
from geojax.models.chunk.remat import rematerialize
from geojax.models.context import ComputeSettings, LayerContext
from geojax.models.layers import Norm
from geojax.models.moe import MoE
from geojax.models.parallel.parallelism import SINGLE_DEVICE
from geojax.models.parallel.partition import partitions
from geojax.models.parallel.sequence_order import local_positions
from geojax.models.parallel.tensor import stream_positions

_SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "head_dim": 8,
    "intermediate_size": 12,
    "vocab_size": 37,
    "max_position_embeddings": 64,
}
_FINE = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.5,
    "router_z_loss_coef": 0.02,
}
MIXTURES = {
    "mixtral": {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5},
    "fine": _FINE,
    "capacity": _FINE | {"capacity_factor": 1.0, "moe_bias": True},
}


def model_with(mixture, **changes):
    return ModelConfig(**_SIZES | MIXTURES[mixture] | changes)


def moe_model(**experts):
    return ModelConfig(**_SIZES | experts)


def uneven_parameters(config, dtype=jnp.float64):
    """Far from their initial values; the router sends most tokens to the first two experts.

    The logits of these are large and opposite: one of them is every token's best.
    """
    random = np.random.default_rng(3)
    parameters = jax.tree.map(
        lambda leaf: leaf + jnp.asarray(0.2 * random.standard_normal(leaf.shape), dtype),
        drawn_parameters(config, dtype, seed=3),
    )
    router = parameters["layers"]["router"]
    first = 10 * router["kernel"][:, :, :1]
    router["kernel"] = jnp.concatenate([first, -first, router["kernel"][:, :, 2:]], axis=2)
    return parameters


def moe_half(parameters, x, segment_ids, positions, config, parallelism=SINGLE_DEVICE):
    """The second half of a layer: its norm, and its experts."""
    graph = nnx.graphdef(Norm(config.hidden_size, config))
    norm = nnx.merge(graph, parameters["feed_forward_norm"])
    names = ("router", "experts", "shared_experts")
    own = {name: parameters[name] for name in names if name in parameters}
    experts = nnx.merge(nnx.graphdef(MoE(config, ComputeSettings(parallelism))), own)
    context = LayerContext(segment_ids, None, None, None, positions)
    return experts(norm(x), context)


def spread_blocks(config, parallelism, mesh, remat="none"):
    """A program on `mesh`: mixture after mixture of all layers, forwards and backwards.

    The program takes the layers' parameters, the stream [rows, columns, hidden] and segment ids,
    and returns nothing that would have to be summed.
    """
    places = partitions(config, parallelism)["layers"]
    batch_axes = ("dc", "data", "expert", "context")

    def varying(leaf, place):
        return to_varying(leaf, (*batch_axes, "tensor") if place.partial else batch_axes)

    def program(parameters, x, segment_ids):
        parameters = jax.tree.map(varying, parameters, places)
        columns = local_positions(x.shape[1], parallelism)
        x, segment_ids = (stream_positions(part, parallelism, dim=1) for part in (x, segment_ids))
        columns = stream_positions(columns, parallelism, dim=0)

        def block(own, x):
            return moe_half(own, x, segment_ids, columns, config, parallelism)

        def body(x, own):
            added, balance = rematerialize(block, remat)(own, x)
            return x + added, balance

        out, backward = jax.vjp(lambda *args: jax.lax.scan(body, *args), x, parameters)
        gradients = backward(out)
        return jax.tree.map(lambda leaf: to_varying(leaf, mesh.axis_names)[None], gradients)

    sharded = jax.shard_map(
        program,
        mesh=mesh,
        in_specs=block_specs(config, parallelism),
        out_specs=PartitionSpec(mesh.axis_names),
    )
    return jax.jit(sharded)


def block_specs(config, parallelism):
    """Of what the program of `spread_blocks` takes."""

    def cut(place):
        dims = range(max(place.axes_by_dim, default=0) + 1)
        return PartitionSpec(*(place.axes_by_dim.get(dim) for dim in dims))

    rows = PartitionSpec(("dc", "data", "expert"), "context")
    return jax.tree.map(cut, partitions(config, parallelism)["layers"]), rows, rows


def block_inputs(config, rows, columns, dtype):
    """The shapes of what the program takes."""
    return (
        parameter_shapes(config, dtype)["layers"],
        jax.ShapeDtypeStruct((rows, columns, config.hidden_size), dtype),
        jax.ShapeDtypeStruct((rows, columns), jnp.int32),
    )
