"""OLMo 2: norms of whole queries and keys, whose ranks hold some of the heads."""

import jax
import pytest
from support.equality import assert_equal_gradients, gradients_of_step, on_one_device
from support.plans import step_plan_on
from support.small_models import drawn_parameters, make_batch

from geojax import make_mesh
from geojax.models import ModelConfig, parameter_count
from geojax.models.families.olmo2 import Olmo2
from geojax.precision import policy

MODEL = Olmo2(
    num_hidden_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=40,
    vocab_size=61,
    max_position_embeddings=64,
)


def test_the_preset_has_the_published_count():
    model = ModelConfig.load("olmo2-7b")
    assert isinstance(model, Olmo2)
    assert parameter_count(model) == 7_298_617_344


@pytest.mark.parametrize(
    ("tensor", "sequence", "remat"),
    [(2, False, "none"), (2, True, "full"), (4, False, "selective"), (4, True, "none")],
)
def test_ranks_of_tensor_give_what_one_device_gives(tensor, sequence, remat):
    with jax.enable_x64():
        policy64 = policy("fp64")
        parameters, batch = drawn_parameters(MODEL, policy64.master_dtype), make_batch(MODEL)
        loss, gradients = on_one_device(MODEL, parameters, batch, None)
        mesh = make_mesh(devices=jax.devices()[: 2 * tensor], data=2, tensor=tensor)
        plan = step_plan_on(mesh, policy64, sequence_parallel=sequence, remat=remat)
        made = gradients_of_step(MODEL, parameters, batch, None, plan)
        assert abs(float(made.loss) - float(loss)) <= 1e-10 * float(loss)
        assert_equal_gradients(made.gradients, gradients, 1e-10)
