"""Parameter groups: leaves with settings of their own, chosen by their names."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.small_models import model_of

from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.models import init_parameters
from geojax.models.declaration import kind_by_name
from geojax.named_arrays import leaves_by_name
from geojax.optim import OptimizerSettings, make_optimizer
from geojax.settings import validate

GROUPS = (
    {"pattern": r"^embedding\.", "learning_rate_factor": 0.5, "weight_decay": 0},
    {"pattern": "norm", "weight_decay": 0.3},
    {"pattern": r"attention\..*kernel$", "optimizer": "lion"},
    {"pattern": "down", "learning_rate_factor": 0},
)
RATE = 1e-2


def settings_of(**changes):
    return OptimizerSettings(
        groups=GROUPS,
        warmup_steps=0,
        schedule="constant",
        peak_learning_rate=RATE,
        clip_norm=None,
        **changes,
    )


def alone(name):
    """Optax's chain for one parameter of the groups above."""
    settings = settings_of()
    own = settings.of_leaf(name, kind_by_name(name))
    adam = optax.scale_by_adam(settings.beta1, settings.beta2, settings.epsilon)
    lion = optax.scale_by_lion(settings.beta1, settings.beta2)
    return optax.chain(
        lion if own.optimizer == "lion" else adam,
        optax.add_decayed_weights(own.weight_decay),
        optax.scale_by_learning_rate(RATE * own.learning_rate_factor),
    )


def gradients_of(parameters, step):
    generator = np.random.default_rng(step)
    return jax.tree.map(lambda leaf: generator.normal(size=leaf.shape), parameters)


def test_each_parameter_is_updated_as_its_group_says():
    with jax.enable_x64():
        parameters = init_parameters(model_of("llama"), jax.random.key(0), jnp.float64)
        optimizer = make_optimizer(settings_of(), 10)
        state, whole = optimizer.init(parameters), parameters
        single, states = leaves_by_name(parameters), {}
        for step in range(2):
            gradients = gradients_of(parameters, step)
            updates, state = optimizer.update(gradients, state, whole)
            whole = optax.apply_updates(whole, updates)
            for name, gradient in leaves_by_name(gradients).items():
                own = states.get(name, alone(name).init(single[name]))
                update, states[name] = alone(name).update(gradient, own, single[name])
                single[name] = optax.apply_updates(single[name], update)
    for name, leaf in leaves_by_name(whole).items():
        np.testing.assert_allclose(leaf, single[name], rtol=1e-12, err_msg=name)
    settings = settings_of()

    def of_leaf(name):
        return settings.of_leaf(name, kind_by_name(name))

    assert of_leaf("layers.attention.output.kernel") == ("lion", 0.1, 1)
    assert of_leaf("layers.attention_norm.scale") == ("adamw", 0.3, 1)
    assert of_leaf("final_norm.bias").weight_decay == 0.3
    assert of_leaf("embedding.tokens.embedding") == ("adamw", 0, 0.5)
    assert of_leaf("layers.attention.query.bias") == ("adamw", 0, 1)


def test_frozen_weights_are_in_no_group():
    parameters = {"query": {"kernel": None, "lora_a": jnp.ones((3, 2)), "lora_b": jnp.ones((2, 3))}}
    made = {}
    for changes in ({}, {"name": "muon", "moment_dtype": "bf16"}, {"groups": GROUPS[2:]}):
        optimizer = make_optimizer(OptimizerSettings(warmup_steps=0, **changes), 10)
        updates, _ = optimizer.update(parameters, optimizer.init(parameters), parameters)
        assert updates["query"]["kernel"] is None
        made[str(changes)] = updates
    first, *others = made.values()  # Muon takes no adapters, and AdamW has all
    for other in others:
        jax.tree.map(lambda *each: np.testing.assert_allclose(*each, rtol=1e-2), first, other)


def test_an_optimizer_of_some_parameters_has_a_state_of_these_alone():
    parameters = jax.eval_shape(lambda: init_parameters(model_of("llama"), jax.random.key(0)))
    held = leaves_by_name(jax.eval_shape(make_optimizer(settings_of(), 10).init, parameters))
    lions = {name for name in held if ".lion." in name and ".mu." in name}
    assert len(lions) == 4
    assert all(".attention." in name and name.endswith("kernel") for name in lions)
    assert not any("attention.query.kernel" in name for name in held if ".adamw." in name)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"pattern": "["}, r"groups.0.pattern: '\[' is no regular expression"),
        ({"pattern": "x", "optimizer": "adam"}, "no optimizer is called 'adam'; choose one of"),
        ({"pattern": "x", "rate": 1}, "groups.0.rate: unknown key"),
    ],
)
def test_a_mistake_is_one_line(group, message):
    with pytest.raises(UserError, match=message):
        validate(OptimizerSettings, {"groups": [group]}, "run.yaml")


def test_a_pattern_without_a_parameter_is_refused():
    content = {
        "run_directory": "run",
        "steps": 1,
        "model": model_of("llama"),
        "data": {},
        "batch": {"global_batch_size": 8, "sequence_length": 32},
        "optimizer": {"groups": [{"pattern": r"^layers\.mlp"}]},
    }
    with pytest.raises(UserError, match=r"'\^layers\\.mlp' is in no parameter's name"):
        validate(RunConfig, content, "run.yaml")
