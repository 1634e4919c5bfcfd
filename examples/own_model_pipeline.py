"""Run a model of your own as a pipeline through two sites, with geojax's executor.

The model predicts each byte of this file from the eight before it. Its eight layers lie on four
stages, two in each site; every stage has two devices, each with its half of the rows. What crosses
the link between the sites is the stream of a microbatch, and its gradient on the way back; both
travel while the next microbatches are computed. Run it on any machine:
python examples/own_model_pipeline.py
"""

from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import geojax
from geojax.collectives import all_reduce
from geojax.hlo import collective_traffic
from geojax.pipeline import Placement, tick_table
from geojax.pipeline.execution import Executor, ModelFunctions, StageWeights, TickProgram
from geojax.runtime import simulate_devices

simulate_devices(8)  # on real accelerators, leave this out
mesh = geojax.make_mesh(dc=2, stage=2, data=2)  # two sites of two stages of two devices

STEPS, MICROBATCHES, ROWS, CONTEXT = 200, 8, 32, 8
STAGES, LAYERS_PER_STAGE, WIDTH = 4, 2, 64
TEXT = np.frombuffer(Path(__file__).read_bytes(), np.uint8)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):  # [rows, WIDTH] -> the same
        hidden = nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(hidden)


class Embedding(nn.Module):
    @nn.compact
    def __call__(self, bytes_before):  # [rows, CONTEXT] -> [rows, WIDTH]
        return nn.Embed(256, WIDTH // CONTEXT)(bytes_before).reshape(len(bytes_before), -1)


embedding, layer, logits = Embedding(), Layer(), nn.Dense(256)


def initial_weights(key):
    """Every leaf has a leading dimension that is cut over the stages: that of the layers; or, for
    what one stage alone needs, that of the stages, of which each has a copy."""
    keys, x = jax.random.split(key, STAGES * LAYERS_PER_STAGE), np.zeros((1, WIDTH))
    ends = embedding.init(key, np.zeros((1, CONTEXT), np.uint8)), logits.init(key, x)
    first, last = jax.tree.map(lambda leaf: np.stack([leaf] * STAGES), ends)
    return StageWeights(first, jax.vmap(layer.init, in_axes=(0, None))(keys, x), last)


def own_copy(weights):
    return jax.tree.map(lambda leaf: leaf[0], weights)


def sum_of_losses(weights, x, batch):
    scores = logits.apply(own_copy(weights), x)
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch["next"]).sum()


functions = ModelFunctions(
    embed=lambda weights, batch: embedding.apply(own_copy(weights), batch["before"]),
    layer=lambda weights, x, number, context: (layer.apply(weights, x), None),
    head=sum_of_losses,
)

# Between the sites a message has two ticks: it travels while all stages compute the next ones.
ticks = tick_table("branch_free", Placement.linear(STAGES), MICROBATCHES, hop_ticks=(1, 2, 1))
executor = Executor(
    TickProgram.of(ticks, branch_free=True),
    functions,
    axes=("dc", "stage"),
)


def mean_gradients(weights, microbatches):
    """On one device: its stage's weights and its rows, to the loss and its stage's gradients."""
    # `pcast` tells JAX that each device has rows of its own, and leaves it to us to sum over them.
    weights = jax.lax.pcast(weights, "data", to="varying")
    made = executor.gradients(weights, microbatches)
    gradients = all_reduce(made.weights, "data", ())
    loss = jax.lax.psum(made.loss, ("dc", "stage", "data"))
    return jax.tree.map(lambda total: total / (MICROBATCHES * ROWS), (loss, gradients))


weights_spec = PartitionSpec(("dc", "stage"))
batch_spec = PartitionSpec(None, "data")  # [microbatches, rows, ...]
sharded_gradients = jax.shard_map(
    mean_gradients,
    mesh=mesh,
    in_specs=(weights_spec, batch_spec),
    out_specs=(PartitionSpec(), weights_spec),
)


def make_batch(step):
    shape = (MICROBATCHES, ROWS)
    start = np.random.default_rng(step).integers(len(TEXT) - CONTEXT, size=shape)
    window = TEXT[start[..., None] + np.arange(CONTEXT + 1)]
    batch = {"before": window[..., :-1], "next": window[..., -1].astype(np.int32)}
    return jax.device_put(batch, NamedSharding(mesh, batch_spec))


def main():
    optimizer = optax.adam(3e-3)

    def train_step(weights, moments, batch):
        loss, gradients = sharded_gradients(weights, batch)
        updates, moments = optimizer.update(gradients, moments, weights)
        return optax.apply_updates(weights, updates), moments, loss

    weights = jax.device_put(initial_weights(jax.random.key(0)), NamedSharding(mesh, weights_spec))
    moments = optimizer.init(weights)
    program = jax.jit(train_step, donate_argnums=(0, 1))
    program = program.lower(weights, moments, make_batch(0)).compile()
    print(f"What one step sends:\n{collective_traffic(program, mesh)}\n")
    for step in range(1, STEPS + 1):
        weights, moments, loss = program(weights, moments, make_batch(step))
        if step == 1 or step % 40 == 0:
            print(f"step {step:3}   loss {loss:.3f}")


if __name__ == "__main__":
    main()
