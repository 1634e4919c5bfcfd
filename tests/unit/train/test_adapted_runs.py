"""Runs with adapters: what they keep, how they go on, and what they refuse."""

import jax
import numpy as np
import pytest
from support.resolving import compiled_run
from support.small_models import make_batch, model_of

from geojax import make_mesh
from geojax.checkpoint import Checkpointer
from geojax.checkpoint.reading.merged_model import MergedModel
from geojax.checkpoint.reading.saved_model import SavedModel
from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.inference.loaded_model import weight_layouts
from geojax.models import init_parameters, parameter_count
from geojax.models.flops import model_flops
from geojax.models.huggingface.checkpoint import HuggingFaceWeights
from geojax.models.huggingface.write import CheckpointWriter
from geojax.named_arrays import leaves_by_name
from geojax.pipeline.simulation.model_costs import head_operations, layer_operations
from geojax.planner.cost.adapters import refuse_adapters
from geojax.train import run_state

ROWS, REQUESTS = 8, {"stop": False, "save": False}
LORA = {"rank": 4, "alpha": 8.0}
CONFIG = {
    "run_directory": "unused",
    "steps": 4,
    "mesh": {"dc": 2, "data": 2},
    "initial_weights": "base",
    "data": {"sources": [{"name": "sums", "prepared": "unused"}]},
    "batch": {"global_batch_size": ROWS, "sequence_length": 32},
    "precision": "fp32",
    "optimizer": {"warmup_steps": 1, "peak_learning_rate": 0.01},
}


def config_of(**changes):
    model = model_of("llama").model_dump(exclude_unset=True) | {"lora": LORA}
    return RunConfig(**CONFIG | {"model": model} | changes)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The weights to adapt, as a checkpoint."""
    folder, model = tmp_path_factory.mktemp("base"), model_of("llama")
    leaves = leaves_by_name(init_parameters(model, jax.random.key(1)))
    with CheckpointWriter(folder, model, dtype="float32", token_ids={}) as writer:
        for name in writer.leaves:
            values = np.asarray(leaves[name])
            writer.put(name, tuple(map(np.arange, values.shape)), values)
    return HuggingFaceWeights(folder, model)


def test_a_resumed_run_goes_on_bit_by_bit_and_its_checkpoint_holds_adapters_alone(base, tmp_path):
    config = config_of()
    mesh = make_mesh(devices=jax.devices()[:4], **config.mesh.model_dump())
    run = compiled_run(config, mesh)
    batches = [make_batch(config.model, seed, ROWS) for seed in range(4)]
    model = config.model.model_dump(mode="json")
    state = run_state.begin(run, base)
    before = jax.device_get(state.parameters)
    with Checkpointer(tmp_path / "checkpoints", mesh, sites=("a", "b")) as checkpointer:
        for step, batch in enumerate(batches):
            if step == 2:
                run_state.save(run, checkpointer, 2, state, {"model": model})
            state, _ = run.step(state, batch, REQUESTS)
        checkpointer.wait()
        resumed, _ = run_state.restore(run, checkpointer, model, base)
        for batch in batches[2:]:
            resumed, _ = run.step(resumed, batch, REQUESTS)
        run_state.save(run, checkpointer, 4, resumed, {"model": model})
    jax.tree.map(np.testing.assert_array_equal, resumed, state)
    moved = jax.tree.map(lambda one, two: np.abs(one - two).max() > 0, before, state.parameters)
    assert all(jax.tree.leaves(moved)), "all adapters should have learned"
    saved = SavedModel.open(tmp_path)
    names = saved.content["arrays"]
    assert not any(name.startswith("frozen") for name in names)
    assert {name.rpartition(".")[2] for name in names if "layers" in name} == {"lora_a", "lora_b"}
    merged = MergedModel(saved, base, config.model)
    count = sum(leaf.size for leaf in merged.adapters.values())
    assert count == parameter_count(config.model) - parameter_count(config.model.base)
    alone = make_mesh(devices=jax.devices()[:1])
    read = merged.read(weight_layouts(config.model.base, alone, np.float32), alone)
    gathered = run.whole_weights(state)
    jax.tree.map(
        lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6), read, gathered
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"initial_weights": None}, "lora requires initial_weights"),
        ({"precision": "fp8-current"}, "lora requires a precision without FP8"),
        ({"dc": {"join": "islands"}}, "lora requires dc.join=one_program"),
        ({"optimizer": {"groups": [{"pattern": "head"}]}}, "'head' is in no parameter's name"),
    ],
)
def test_what_adapters_do_not_go_with_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_of(**changes)


@pytest.mark.parametrize(
    ("targets", "changes", "message"),
    [
        ([], {}, "names no layer"),
        (["gate_proj"], {"hidden_act": "relu2"}, "the model has no gate_proj"),
        (["up_proj"], {"num_experts": 2, "num_experts_per_tok": 1}, "has no up_proj outside of"),
        (["lm_head"], {}, "all-linear"),
        (["q_proj"], {"num_nextn_predict_layers": 1}, "lora requires num_nextn_predict_layers=0"),
    ],
)
def test_layers_that_cannot_have_adapters_are_refused(targets, changes, message):
    with pytest.raises(ValueError, match=message):
        model_of("llama").replace(lora=LORA | {"target_modules": targets}, **changes)


def test_a_plan_by_formula_refuses_adapters():
    with pytest.raises(UserError, match="a plan by formula knows no adapters"):
        refuse_adapters(config_of().model)


def test_operations_of_frozen_weights_are_those_of_two_thirds():
    model, length = config_of().model, 32
    layer, head = layer_operations(model, length), head_operations(model, length)
    dense = layer_operations(model.base, length)
    assert model.num_hidden_layers * sum(layer) + sum(head) == model_flops(model, length)
    adapters = parameter_count(model) - parameter_count(model.base)
    assert layer.weight == 2 * adapters / model.num_hidden_layers
    assert sum(layer) == sum(dense) - dense.weight + 3 * layer.weight
