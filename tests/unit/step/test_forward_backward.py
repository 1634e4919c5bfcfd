"""A model as three chunks, each pass a program of its own, equals one device to 1e-10."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from support.equality import assert_equal_gradients
from support.small_models import FAMILIES, drawn_parameters, make_batch

from geojax import make_mesh
from geojax.mesh import AXES
from geojax.models import ModelConfig, loss_sum
from geojax.models.chunk.layer_io import StackedGradients
from geojax.models.parallel.varying import vary_over, varying_axes, zeros_of
from geojax.models.transformer import read_by_head
from geojax.precision import policy
from geojax.step.forward_backward import ForwardBackward
from geojax.step.plan import StepPlan

CHUNKS = (range(2), range(2, 3), range(3, 6))
SIZES = {
    "num_hidden_layers": 6,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "head_dim": 8,
    "intermediate_size": 20,
    "vocab_size": 31,
    "max_position_embeddings": 64,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2}


@functools.cache
def setting(family):
    """A model, its parameters, a batch, a dropout key, and one device's loss and gradients."""
    options = FAMILIES["llama"] | MOE if family == "moe" else FAMILIES[family]
    model = ModelConfig(**SIZES | options)
    parameters = drawn_parameters(model, jnp.float64)
    batch = jax.tree.map(jnp.asarray, make_batch(model, rows=4, sequence=16))
    key = jax.random.key(7) if model.dropout else None
    alone = jax.value_and_grad(lambda own: loss_sum(own, batch, model, dropout_key=key)[0])
    return model, parameters, batch, key, jax.jit(alone)(parameters)


class Programs:
    """Passes of chunks on a mesh, each compiled alone; what one returns the next one takes.

    On a mesh of several devices a pass is inside a `shard_map`: arrays leave it with a leading dim
    for the devices among which they vary.
    """

    def __init__(self, mesh):
        self._mesh = mesh

    def call(self, function, *arguments):
        """Return `function(*arguments)`, from a program of its own."""
        leaves, structure = jax.tree.flatten(arguments)
        values = [leaf.value if isinstance(leaf, Varying) else leaf for leaf in leaves]
        specs_in = [leaf.spec if isinstance(leaf, Varying) else None for leaf in leaves]
        made = {}

        def inside(*values):
            own = [
                value if spec is None else value[0]
                for value, spec in zip(values, specs_in, strict=True)
            ]
            result = function(*jax.tree.unflatten(structure, own))
            results, made["structure"] = jax.tree.flatten(result)
            made["specs"] = [axes_spec(varying_axes(leaf)) for leaf in results]
            return [leaf[None] for leaf in results]

        def program(specs):
            return jax.jit(
                jax.shard_map(
                    inside,
                    mesh=self._mesh,
                    in_specs=tuple(spec or PartitionSpec() for spec in specs_in),
                    out_specs=specs,
                )
            )

        # What a result varies over is known when the program is traced: first to learn that.
        everything = PartitionSpec(AXES)
        jax.eval_shape(program(everything), *values)
        results = program(made["specs"])(*values)
        wrapped = map(Varying, results, made["specs"])
        return jax.tree.unflatten(made["structure"], list(wrapped))


class Varying:
    """An array with a leading dim for the devices among which it varies; a leaf of a tree."""

    def __init__(self, value, spec):
        self.value, self.spec = value, spec


def axes_spec(axes):
    return PartitionSpec(tuple(axis for axis in AXES if axis in axes) or None)


def chunked(family, axes, split):
    """Loss and gradients from three chunks: F1 F2 F3, then B3 B2 B1, or B W of each."""
    model, parameters, batch, key, _ = setting(family)
    mesh = make_mesh(devices=jax.devices()[: axes.get("data", 1)], **axes)
    run = ForwardBackward(model, StepPlan(mesh, policy("fp64")), key)
    chunks = [run.chunk(layers) for layers in CHUNKS]
    programs = Programs(mesh)
    spread = frozenset(axes)

    def own_batch(batch):
        ranks = jax.lax.axis_size("data")
        rank = jax.lax.axis_index("data")
        return jax.tree.map(lambda x: x.reshape(ranks, -1, *x.shape[1:])[rank], batch)

    def weights_of(number, parameters):
        """This chunk's, from all parameters, typed as varying like the batch."""
        parameters = vary_over(parameters, spread)
        layers = CHUNKS[number]
        stacked = jax.tree.map(lambda x: x[layers.start : layers.stop], parameters["layers"])
        last = read_by_head(parameters, model)
        return chunks[number].stacked_weights(parameters["embedding"], stacked, last), stacked

    def forward(number, parameters, x, batch):
        batch = own_batch(batch)
        chunk = chunks[number]
        weights, _ = weights_of(number, parameters)
        made = chunk.forward(weights, x, batch, chunk.functions.context(batch))
        return made.x, made.balance, made.residuals

    def backward(number, parameters, residuals, cotangent, batch):
        batch = own_batch(batch)
        chunk, sink = chunks[number], StackedGradients(jnp.float64, once=True)
        weights, stacked = weights_of(number, parameters)
        context = chunk.functions.context(batch)
        arguments = (weights, residuals, cotangent, batch, context)
        if split:
            made = chunk.input_gradient(*arguments)
        else:
            made = chunk.backward(*arguments, sink, zeros_of(stacked))
        return made._replace(prefetched=[])

    def weight(number, parameters, residuals, held, batch):
        batch = own_batch(batch)
        chunk, sink = chunks[number], StackedGradients(jnp.float64, once=True)
        weights, stacked = weights_of(number, parameters)
        context = chunk.functions.context(batch)
        return chunk.weight_gradients(weights, residuals, held, context, sink, zeros_of(stacked))

    x, kept, balance = None, [], 0.0
    for number in range(3):
        x, added, residuals = programs.call(
            functools.partial(forward, number), parameters, x, batch
        )
        kept.append(residuals)
        balance += 0.0 if added is None else added.value.sum()
    made, cotangent = [], None
    for number in reversed(range(3)):
        one = programs.call(
            functools.partial(backward, number), parameters, kept[number], cotangent, batch
        )
        made.insert(0, one)
        cotangent = one.x
    layers = [one.layers for one in made]
    if split:
        layers = [
            programs.call(functools.partial(weight, number), parameters, kept[number], held, batch)
            for number, held in enumerate(layers)
        ]
    summed = [jax.tree.map(lambda leaf: leaf.value.sum(axis=0), each) for each in layers]
    last, first = (
        jax.tree.map(lambda leaf: leaf.value.sum(axis=0), each)
        for each in (made[2].last, made[0].first)
    )
    gradients = run.non_layer_gradients(first, last)
    gradients["layers"] = jax.tree.map(lambda *parts: jnp.concatenate(parts), *summed)
    return made[2].loss.value.sum() + balance, gradients


@pytest.mark.parametrize("split", [False, True], ids=["B", "B and W"])
@pytest.mark.parametrize(
    ("family", "axes"),
    [("gpt3", {}), ("llama", {"data": 2}), ("moe", {})],
    ids=["gpt3", "llama on two devices", "moe"],
)
def test_three_chunks_give_the_gradients_of_one_device(family, axes, split):
    with jax.enable_x64(True):
        *_, (loss, gradients) = setting(family)
        made_loss, made = chunked(family, axes, split)
        # Softmax does not see what a key bias adds to all scores of a query alike.
        zero = ("gradients.layers.attention.key.bias",) if family == "gpt3" else ()
        wanted = {"loss": loss, "gradients": gradients}
        assert_equal_gradients({"loss": made_loss, "gradients": made}, wanted, 1e-10, zero)
