"""Run a model of your own as a pipeline through two sites.

The model predicts each byte of this file from the eight before it. Its eight layers lie on four
stages, two in each site; every stage has two devices, each with its half of the sequences. The
stream of a microbatch crosses the link between the sites, and its gradient on the way back; both
travel while the next microbatches are computed. Run it on any machine:
python examples/own_model_pipeline.py
"""

from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax

import geojax
from geojax.runtime import simulate_devices

simulate_devices(8)  # on real accelerators, leave this out
mesh = geojax.make_mesh(dc=2, stage=2, data=2)  # two sites of two stages of two devices

STEPS, MICROBATCHES, SEQUENCES, CONTEXT, LAYERS, WIDTH = 200, 8, 32, 8, 8, 64
TEXT = np.frombuffer(Path(__file__).read_bytes(), np.uint8)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):  # [sequences, WIDTH] -> the same
        hidden = nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(hidden)


table, layer, logits = nn.Embed(256, WIDTH // CONTEXT), Layer(), nn.Dense(256)


def sum_of_losses(weights, x, batch):
    scores = logits.apply(weights, x)
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch["next"]).sum()


pipeline = geojax.Pipeline(
    mesh,
    embed=lambda weights, batch: table.apply(weights, batch["before"]).reshape(-1, WIDTH),
    layer=layer.apply,
    head=sum_of_losses,
    microbatches=MICROBATCHES,
    schedule="branch_free",
    hop_ticks=2,  # between the sites a message travels while all stages compute
)
batch_spec = jax.P(None, "data")  # [microbatches, sequences, ...]
loss_and_gradients = jax.shard_map(
    pipeline.loss_and_gradients,
    mesh=mesh,
    in_specs=(pipeline.weights_spec, batch_spec),
    out_specs=(jax.P(), pipeline.weights_spec),
)


def initial_weights(key):
    x = np.zeros((1, WIDTH))
    layers = jax.vmap(layer.init, in_axes=(0, None))(jax.random.split(key, LAYERS), x)
    return table.init(key, np.zeros((1, CONTEXT), np.uint8)), layers, logits.init(key, x)


def make_batch(step):
    shape = (MICROBATCHES, SEQUENCES)
    start = np.random.default_rng(step).integers(len(TEXT) - CONTEXT, size=shape)
    window = TEXT[start[..., None] + np.arange(CONTEXT + 1)]
    batch = {"before": window[..., :-1], "next": window[..., -1].astype(np.int32)}
    return jax.device_put(batch, jax.NamedSharding(mesh, batch_spec))


def main():
    optimizer = optax.adam(3e-3)

    def train_step(weights, moments, batch):
        loss, gradients = loss_and_gradients(weights, batch)
        updates, moments = optimizer.update(gradients, moments, weights)
        mean = loss / (MICROBATCHES * SEQUENCES)  # Adam does not mind the scale of gradients
        return optax.apply_updates(weights, updates), moments, mean

    weights = pipeline.shard(*initial_weights(jax.random.key(0)))
    moments = optimizer.init(weights)
    program = jax.jit(train_step, donate_argnums=(0, 1))
    program = program.lower(weights, moments, make_batch(0)).compile()
    print(f"What one step sends:\n{geojax.collective_traffic(program, mesh)}\n")
    for step in range(1, STEPS + 1):
        weights, moments, loss = program(weights, moments, make_batch(step))
        if step == 1 or step % 40 == 0:
            print(f"step {step:3}   loss {loss:.3f}")


if __name__ == "__main__":
    main()
