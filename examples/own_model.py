"""Train a model of your own across two sites, with geojax's parts inside your own `shard_map`.

The model predicts each byte of this file from the eight before it. Weights and Adam moments are
sharded inside a site; what crosses the link between the sites is the gradient, of which every
device sends its own quarter. Run it on any machine: python examples/own_model.py
"""

from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import geojax
from geojax.runtime import simulate_devices

simulate_devices(8)  # on real accelerators, leave this out
mesh = geojax.make_mesh(dc=2, data=4)  # two sites of four devices

STEPS, ROWS, CONTEXT = 200, 256, 8
TEXT = np.frombuffer(Path(__file__).read_bytes(), np.uint8)


class NextByte(nn.Module):
    @nn.compact
    def __call__(self, context):  # [rows, CONTEXT] -> logits [rows, 256]
        x = nn.Embed(num_embeddings=256, features=16)(context)
        x = nn.gelu(nn.Dense(128)(x.reshape(len(context), -1)))
        return nn.Dense(256)(x)


def make_batch(step):
    start = np.random.default_rng(step).integers(len(TEXT) - CONTEXT, size=ROWS)
    window = TEXT[start[:, None] + np.arange(CONTEXT + 1)]
    return window[:, :-1], window[:, -1]


def train_step(state, batch):
    """On one device: its shard of the state and its rows of the batch, to its next shard."""
    shards, moments = state
    context, target = batch

    # Whole weights, from the shards inside the site. `pcast` tells JAX that they are this device's
    # own from here on, so that it leaves it to us to sum their gradients over the sites.
    weights = geojax.all_gather(shards, "data", dims=0, shapes=parameters)
    weights = jax.lax.pcast(weights, "dc", to="varying")

    def part_of_mean(weights):  # of the loss over the global batch
        logits = model.apply(weights, context)
        return optax.softmax_cross_entropy_with_integer_labels(logits, target).sum() / ROWS

    loss, gradients = jax.value_and_grad(part_of_mean)(weights)

    # Summed inside the site, then across sites; each device keeps its shard, and updates it.
    gradients = geojax.reduce_scatter(gradients, "data", "dc", dims=0)
    updates, moments = optimizer.update(gradients, moments, shards)
    return (optax.apply_updates(shards, updates), moments), jax.lax.psum(loss, ("dc", "data"))


model, optimizer = NextByte(), optax.adam(3e-3)
parameters = model.init(jax.random.key(0), make_batch(0)[0])
state = (parameters, optimizer.init(parameters))

# Every leaf is cut along its first dimension over the devices of a site; Adam's step count is not.
state_spec = jax.tree.map(
    lambda leaf: PartitionSpec("data") if leaf.ndim else PartitionSpec(), state
)
batch_spec = PartitionSpec(("dc", "data"))
state_place, batch_place = jax.tree.map(
    lambda spec: NamedSharding(mesh, spec), (state_spec, batch_spec)
)
sharded_step = jax.shard_map(
    train_step,
    mesh=mesh,
    in_specs=(state_spec, batch_spec),
    out_specs=(state_spec, PartitionSpec()),
)

state = jax.device_put(state, state_place)
batch = jax.device_put(make_batch(0), batch_place)
program = jax.jit(sharded_step, donate_argnums=0).lower(state, batch).compile()
print(f"What one step sends:\n{geojax.collective_traffic(program, mesh)}\n")

for step in range(1, STEPS + 1):
    state, loss = program(state, jax.device_put(make_batch(step), batch_place))
    if step == 1 or step % 40 == 0:
        print(f"step {step:3}   loss {loss:.3f}")
