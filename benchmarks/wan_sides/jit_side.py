"""A process of plain JAX: `jax.jit` over sharded arrays, where XLA places the sums."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from geojax import runtime
from geojax.cache import cache_folder
from geojax.hlo import collective_traffic
from geojax.mesh import make_mesh
from geojax.models import ModelConfig, init_parameters
from geojax.models.declaration import kind_by_name
from geojax.models.transformer import loss_sum
from geojax.optim.optimizer import decay_weights
from wan_sides.jax_process import PATIENCE_SECONDS, join
from wan_sides.serving import own_work, serve, take_steps
from wan_sides.work import MODEL, OPTIMIZER, ROWS, SEED, batch


class Worker:
    def start(self) -> dict[str, Any]:
        work = own_work()
        join(work)
        runtime.enable_compilation_cache(cache_folder() / "xla")
        model = ModelConfig(**MODEL)
        mesh = make_mesh(dc=2)
        everywhere = NamedSharding(mesh, PartitionSpec())
        over_rows = NamedSharding(mesh, PartitionSpec(("dc", "data")))
        optimizer = optax.chain(
            optax.clip_by_global_norm(OPTIMIZER["clip_norm"]),
            optax.scale_by_adam(OPTIMIZER["beta1"], OPTIMIZER["beta2"], OPTIMIZER["epsilon"]),
            decay_weights(
                lambda name: OPTIMIZER["weight_decay"] * (kind_by_name(name) != "vector")
            ),
            optax.scale_by_learning_rate(OPTIMIZER["peak_learning_rate"]),
        )

        def train_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
            parameters, moments = state

            def mean_loss(parameters: Any) -> jax.Array:
                total, targets = loss_sum(parameters, batch, model)
                return total / targets

            loss, gradients = jax.value_and_grad(mean_loss)(parameters)
            updates, moments = optimizer.update(gradients, moments, parameters)
            return (optax.apply_updates(parameters, updates), moments), loss

        def initial(key: jax.Array) -> Any:
            parameters = init_parameters(model, key, jnp.float32)
            return parameters, optimizer.init(parameters)

        self.state = jax.jit(initial, out_shardings=everywhere)(jax.random.key(SEED))
        own = slice(work["process"] * ROWS // 2, (work["process"] + 1) * ROWS // 2)
        self.batch = {
            name: jax.make_array_from_process_local_data(over_rows, values[own], values.shape)
            for name, values in batch().items()
        }
        self.step = (
            jax.jit(train_step, donate_argnums=0, out_shardings=everywhere)
            .lower(self.state, self.batch)
            .compile()
        )
        sent = float(collective_traffic(self.step, mesh).bytes_over("dc"))
        runtime.barrier("ready", timeout_seconds=PATIENCE_SECONDS)
        return {"formula_bytes": 2 * sent, "versions": {"jax": jax.__version__}}

    def one_step(self) -> float:
        self.state, loss = jax.block_until_ready(self.step(self.state, self.batch))
        return float(loss)

    def steps(self, count: int) -> dict[str, Any]:
        return take_steps(self.one_step, count)


if __name__ == "__main__":
    worker = Worker()
    serve({"start": worker.start, "steps": worker.steps})
