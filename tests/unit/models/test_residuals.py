"""What the forward of a layer keeps for its backward, and that the backward is right with it."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from support.equality import assert_equal_gradients
from support.small_models import FAMILIES, ROWS, SEQUENCE, drawn_parameters, make_batch, model_of

from geojax.models.block import Block
from geojax.models.chunk.layer_io import StackedGradients, layer_slice
from geojax.models.chunk.layer_scan import Layers, LayerSpan
from geojax.models.chunk.remat import rematerialize
from geojax.models.chunk.residuals import forward
from geojax.models.context import make_context


def setting(family):
    """A model, its layers, a first stream and what the layers read beside it."""
    model = model_of(family)
    layers = drawn_parameters(model)["layers"]
    x = jax.random.normal(jax.random.key(2), (ROWS, SEQUENCE, model.hidden_size))
    batch = jax.tree.map(jnp.asarray, make_batch(model))
    return model, layers, x, make_context(batch, model, x.dtype, jax.random.key(7))


def layer(weights, x, index, context, model):
    return nnx.merge(nnx.graphdef(Block(model)), weights)(x, context._replace(layer=index))


def kept(family, remat):
    """The shapes of what one layer keeps, and those of its weights and its stream."""
    model, layers, x, context = setting(family)

    def one(weights, x, index, context):
        again = (weights, index, context)
        function = rematerialize(lambda weights, x: layer(weights, x, index, context, model), remat)
        return forward(function, weights, x, again=again)[1].saved

    weights = layer_slice(layers, 0)
    saved = jax.eval_shape(one, weights, x, jnp.int32(0), context)
    return saved, jax.tree.leaves(weights), x


def size(arrays):
    return sum(array.size * array.dtype.itemsize for array in arrays)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_weight_is_kept_and_the_policies_keep_less_and_less(family):
    everything, selected, (alone,) = (
        kept(family, remat)[0] for remat in ("none", "selective", "full")
    )
    _, weights, x = kept(family, "full")
    assert (alone.shape, alone.dtype) == (x.shape, x.dtype), "the layer's input, and nothing else"
    shapes = {weight.shape for weight in weights}
    for saved in (everything, selected):
        assert not [array for array in saved if array.shape in shapes]
    assert size(everything) > size(selected) > size([alone])


@pytest.mark.parametrize(
    ("family", "remat", "together"),
    [("gpt3", "none", 1), ("llama", "selective", 3), ("nemotron", "full", 1)],
)
def test_the_backward_is_that_of_the_model(family, remat, together):
    with jax.enable_x64(True):
        model, layers, x, context = setting(family)
        layers, x = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), (layers, x))
        cotangent = jax.random.normal(jax.random.key(3), x.shape, x.dtype)

        def one_after_the_other(layers, x):
            for index in range(model.num_hidden_layers):
                x, _ = layer(layer_slice(layers, index), x, jnp.int32(index), context, model)
            return x

        @jax.jit
        def by_jax(layers, x):
            y, backward = jax.vjp(one_after_the_other, layers, x)
            return {"y": y, "gradients": backward(cotangent)}

        @jax.jit
        def by_hand(layers, x):
            sink = StackedGradients(x.dtype, once=True)
            function = rematerialize(lambda *arguments: layer(*arguments, model), remat)
            run = Layers((LayerSpan(model.num_hidden_layers, function),))
            made = run.forward(run.stacked_weights(layers), x, context)
            backward = run.backward(
                made.weights,
                made.residuals,
                (cotangent, None),
                context,
                sink,
                sink.start(layer_slice(layers, 0), model.num_hidden_layers),
                bucket_layers=together,
            )
            return {"y": made.x, "gradients": (backward.sums, backward.x)}

        # Softmax does not see what a key bias adds to all scores of a query alike.
        zero = ("gradients.0.attention.key.bias",) if family == "gpt3" else ()
        assert_equal_gradients(by_hand(layers, x), by_jax(layers, x), 1e-10, zero)
