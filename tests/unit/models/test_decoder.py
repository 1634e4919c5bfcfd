"""Generation agrees with the model that reads whole texts, on one device and on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_families import FAMILIES

from geojax.errors import UserError
from geojax.inference import LoadedModel, Sampling, generate
from geojax.inference.loaded_model import serving_mesh, weight_layouts
from geojax.models import logits
from geojax.sharding import leaf_layouts

GREEDY = Sampling(temperature=0)
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]


def _whole(tokens):
    tokens = np.asarray(tokens, np.int32)[None]
    return {
        "tokens": tokens,
        "segment_ids": np.ones_like(tokens),
        "positions": np.arange(tokens.size, dtype=np.int32)[None],
        "row": np.zeros(1, np.int32),
    }


def _on_one_device(config, parameters):
    return LoadedModel.on_one_device(config, jax.device_put(parameters, jax.devices()[0]))


GEMMA = FAMILIES["llama"].replace(
    rope_parameters={"rope_theta": 100.0},
    norm="rmsnorm1p",
    sandwich_norm=True,
    query_pre_attn_scalar=5,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=3.0,
    scale_embeddings=True,
    sliding_window=4,
    layer_types=("sliding_attention", "full_attention"),
    rope_local_base_freq=10.0,
)


def test_greedy_takes_the_models_most_likely_token(config, x64, random_parameters):
    check_greedy(config, random_parameters(config, jnp.float64))


def test_windows_caps_and_norms_behind_blocks(x64, random_parameters):
    check_greedy(GEMMA, random_parameters(GEMMA, jnp.float64))


def check_greedy(config, parameters):
    model = _on_one_device(config, parameters)
    written = generate(model, PROMPTS, max_new_tokens=6, sampling=GREEDY)
    read = jax.jit(lambda batch: logits(parameters, batch, config)[0])
    for prompt, continuation in zip(PROMPTS, written, strict=True):
        text = [*prompt, *continuation]
        scores = np.asarray(read(_whole(np.pad(text, (0, 11 - len(text))))))
        best = scores[len(prompt) - 1 : len(text) - 1].argmax(-1)
        np.testing.assert_array_equal(continuation, best)


@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("llama", {"data": 2, "tensor": 2}),
        ("nemotron", {"tensor": 4}),  # more ranks than key heads, an odd vocabulary
        ("mixture", {"expert": 2, "tensor": 2}),
    ],
)
def test_a_mesh_writes_what_one_device_writes(family, axes, x64, random_parameters):
    """In batches too, whose last one lacks a prompt; drawn tokens included."""
    config = FAMILIES[family]
    parameters = random_parameters(config, jnp.float64)
    options = {"max_new_tokens": 4, "sampling": Sampling(0.8, top_p=0.9), "seed": 5}
    expected = generate(_on_one_device(config, parameters), PROMPTS, **options)
    mesh = serving_mesh(**{"data": 1, "expert": 1, "tensor": 1} | axes)
    layouts = weight_layouts(config, mesh, jnp.float64)
    padded = jax.tree.map(lambda leaf, own: own.pad(leaf), parameters, layouts)
    shards = jax.device_put(padded, leaf_layouts.shardings(layouts, mesh))
    model = LoadedModel(config, mesh, shards)
    assert generate(model, PROMPTS, **options, batch_size=2) == expected


def test_a_text_ends_at_the_stop_token(random_parameters):
    config = FAMILIES["llama"]
    model = _on_one_device(config, random_parameters(config, jnp.float32))
    unbound = generate(model, PROMPTS, max_new_tokens=6, sampling=GREEDY)
    stop = unbound[0][3]
    found = generate(model, PROMPTS, max_new_tokens=6, sampling=GREEDY, stop_tokens=[stop])
    assert found == [text[: text.index(stop)] if stop in text else text for text in unbound]
    assert len(found[0]) <= 3


def test_draws_follow_the_models_distribution(random_parameters):
    config = FAMILIES["llama"]
    parameters = random_parameters(config, jnp.float32)
    many = 4000
    model = _on_one_device(config, parameters)

    def drawn(**sampling):
        options = {"max_new_tokens": 1, "sampling": Sampling(1.5, **sampling), "batch_size": many}
        return np.ravel(generate(model, [[3, 1, 4]] * many, **options, seed=1))

    scores = logits(parameters, _whole([3, 1, 4]), config)[0, -1]
    want = np.asarray(jax.nn.softmax(scores / 1.5))
    share = np.bincount(drawn(), minlength=config.vocab_size) / many
    assert np.abs(share - want).max() < 5 * np.sqrt(want.max() / many)
    descending = np.argsort(-want)
    fewest = 1 + int(np.argmax(np.cumsum(want[descending]) >= 0.6))
    assert 1 < fewest < config.vocab_size
    assert set(drawn(top_p=0.6)) == set(descending[:fewest].tolist())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": [[1], []]}, "a prompt is empty"),
        ({"prompts": [[1, 37]]}, "token 37 in a prompt is outside .*0 to 36"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 16}, "take 17 positions, the model has 16 .*at most 15 new"),
    ],
)
def test_refusals(change, message, random_parameters):
    config = FAMILIES["gpt3"]
    model = _on_one_device(config, random_parameters(config, jnp.float32))
    given = {"prompts": [[1, 2]], "max_new_tokens": 1, "sampling": GREEDY} | change
    with pytest.raises(UserError, match=message):
        generate(model, **given)


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
    ],
)
def test_a_sampling_that_cannot_be_is_refused(given):
    with pytest.raises(UserError, match=f"{next(iter(given))} is .*would be right"):
        Sampling(**given)
