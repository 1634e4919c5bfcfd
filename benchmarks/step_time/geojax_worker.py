"""The geojax side: the step that `geojax train` compiles, on a mesh of one device."""

import json
import sys

from protocol import memory_bytes, pin_to_cores, reset_peak_memory, serve, time_calls

WORK = json.loads(sys.argv[1])
pin_to_cores(WORK["threads"])

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from geojax.config.layout import Layout
from geojax.config.layout_sections import BatchSettings
from geojax.mesh import make_mesh
from geojax.models import ModelConfig
from geojax.models.attention import attention
from geojax.models.head import cross_entropy_sum
from geojax.optim import (
    OptimizerSettings,
    global_norm,
    learning_rate_schedule,
    make_optimizer,
)
from geojax.precision import policy
from geojax.step.plan import StepPlan
from geojax.step.program import batch_on_mesh, batch_shape, lower_step, signals_on_mesh
from geojax.step.state import initial_state, state_layouts

ROWS, SEQUENCE = WORK["rows"], WORK["sequence"]
MODEL = ModelConfig(**WORK["model"])
OPTIMIZER = OptimizerSettings(**WORK["optimizer"])


class Worker:
    def __init__(self) -> None:
        self.mesh = make_mesh(devices=jax.devices()[:1])
        batch = BatchSettings(global_batch_size=ROWS, sequence_length=SEQUENCE)
        layout = Layout(batch=batch, remat=WORK["remat"])
        plan = StepPlan(self.mesh, policy("fp32"), layout)
        steps = 1_000_000  # the schedule's end is far away; PyTorch's rate is constant
        self.optimizer = make_optimizer(OPTIMIZER, steps)
        layouts = state_layouts(MODEL, self.optimizer, plan)
        schedule = learning_rate_schedule(OPTIMIZER, steps)
        shapes = batch_shape(ROWS, SEQUENCE)
        lowered = lower_step(layouts, MODEL, plan, self.optimizer, schedule, shapes)
        self.step = lowered.compile()
        self.state = initial_state(MODEL, self.optimizer, layouts, plan, seed=0)
        np.savez(WORK["weights"], **dict(_named(self.state.parameters)))
        place = functools.partial(jax.tree.map, lambda x, s: jax.device_put(x, s.sharding))
        self.batch = place(_batch(), batch_on_mesh(shapes, plan))
        signals = signals_on_mesh(plan)
        self.signals = place(jnp.zeros(signals.shape, signals.dtype), signals)

    def one_step(self) -> float:
        self.state, metrics = self.step(self.state, self.batch, self.signals, np.uint32(0))
        return float(metrics["loss"])

    def versions(self) -> dict[str, str]:
        return {name: sys.modules[name].__version__ for name in ("jax", "jaxlib", "optax")}

    def losses(self, count: int) -> list[float]:
        return [self.one_step() for _ in range(count)]

    def steps(self, count: int) -> list[float]:
        return time_calls(self.one_step, count)

    def memory(self, count: int) -> dict[str, int]:
        reset_peak_memory()
        time_calls(self.one_step, count)
        return memory_bytes()

    def parts(self, count: int) -> dict[str, float]:
        """Seconds of each part of a step by itself, forward and backward: the best of `count`."""
        programs = {
            "attention": self._attention(),
            "matrix products": self._products(),
            "loss": self._loss(),
            "optimizer": self._optimizer(),
        }
        seconds = {}
        for name, (repeat, call) in programs.items():
            time_calls(call, 2)
            seconds[name] = repeat * min(time_calls(call, count))
        return seconds

    def _attention(self):
        heads = (ROWS, SEQUENCE, MODEL.num_attention_heads, MODEL.head_dim)
        groups = (ROWS, SEQUENCE, MODEL.num_key_value_heads, MODEL.head_dim)
        segments = jnp.ones((ROWS, SEQUENCE), jnp.int32)
        inputs = _random(heads, groups, groups)
        return MODEL.num_hidden_layers, _forward_and_backward(
            lambda q, k, v: attention(q, k, v, segments), inputs
        )

    def _products(self):
        tokens, hidden, wide = ROWS * SEQUENCE, MODEL.hidden_size, MODEL.intermediate_size
        head, group = (
            MODEL.num_attention_heads * MODEL.head_dim,
            MODEL.num_key_value_heads * MODEL.head_dim,
        )
        pairs = ((hidden, head), (hidden, group), (hidden, group), (head, hidden))
        pairs += ((hidden, wide), (hidden, wide), (wide, hidden))
        states = _random(*((tokens, inputs) for inputs, _ in pairs))
        kernels = _random(*pairs)
        return MODEL.num_hidden_layers, _forward_and_backward(
            lambda states, kernels: [x @ kernel for x, kernel in zip(states, kernels, strict=True)],
            (states, kernels),
        )

    def _loss(self):
        targets, mask = jnp.asarray(_batch()["targets"]), jnp.ones((ROWS, SEQUENCE))
        shapes = ((ROWS, SEQUENCE, MODEL.hidden_size), (MODEL.hidden_size, MODEL.vocab_size))
        return 1, _forward_and_backward(
            lambda hidden, kernel: cross_entropy_sum(hidden, kernel, targets, mask),
            _random(*shapes),
        )

    def _optimizer(self):
        def update(gradients, state):
            parameters, moments = state
            norm = global_norm(gradients)
            updates, moments = self.optimizer.update(gradients, moments, parameters, norm=norm)
            return optax.apply_updates(parameters, updates), moments

        # The axes of the mesh must be bound: clipping sums over them.
        program = jax.jit(
            jax.shard_map(
                update,
                mesh=self.mesh,
                in_specs=jax.sharding.PartitionSpec(),
                out_specs=jax.sharding.PartitionSpec(),
            ),
            donate_argnums=1,
        )
        gradients = jax.tree.map(jnp.ones_like, self.state.parameters)
        state = jax.tree.map(jnp.copy, (self.state.parameters, self.state.optimizer))

        def call() -> None:
            nonlocal state
            state = jax.block_until_ready(program(gradients, state))

        return 1, call


def _batch() -> dict[str, np.ndarray]:
    with np.load(WORK["batch"]) as batch:
        return dict(batch)


def _named(tree: object) -> list[tuple[str, np.ndarray]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [("/".join(k.key for k in path), np.asarray(leaf)) for path, leaf in leaves]


def _random(*shapes: tuple[int, ...]) -> list[jax.Array]:
    generator = np.random.default_rng(0)
    return [jnp.asarray(0.1 * generator.standard_normal(s), jnp.float32) for s in shapes]


def _forward_and_backward(function, inputs):
    @jax.jit
    def both(inputs, cotangent):
        output, backward = jax.vjp(function, *inputs)
        return output, backward(cotangent)

    cotangent = jax.tree.map(jnp.ones_like, jax.eval_shape(function, *inputs))
    return lambda: jax.block_until_ready(both(inputs, cotangent))


if __name__ == "__main__":
    worker = Worker()
    serve({name: getattr(worker, name) for name in WORK["requests"]})
