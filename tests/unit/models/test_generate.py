"""Generation agrees with the model that reads the whole text at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_families import FAMILIES

from geojax.errors import UserError
from geojax.models import generate, logits


def _whole(tokens):
    tokens = np.asarray(tokens, np.int32)[None]
    return {
        "tokens": tokens,
        "segment_ids": np.ones_like(tokens),
        "positions": np.arange(tokens.size, dtype=np.int32)[None],
        "row": np.zeros(1, np.int32),
    }


def test_greedy_takes_the_models_most_likely_token(config, x64, random_parameters):
    parameters = random_parameters(config, jnp.float64)
    prompts = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
    key = jax.random.key(0)
    new = generate(parameters, config, prompts, count=6, temperature=0, key=key)
    assert new.shape == (3, 6)
    assert new.dtype == np.int32
    read = jax.jit(lambda parameters, batch: logits(parameters, batch, config))
    for prompt, continuation in zip(prompts, new, strict=True):
        text = [*prompt, *continuation]
        scores = np.asarray(read(parameters, _whole(text)))[0]
        best = scores[len(prompt) - 1 : -1].argmax(-1)
        np.testing.assert_array_equal(continuation, best)


def test_draws_follow_the_models_distribution(random_parameters):
    config = FAMILIES["llama"]
    parameters = random_parameters(config, jnp.float32)
    many = 4000
    drawn = generate(
        parameters, config, [[3, 1, 4]] * many, count=1, temperature=1.5, key=jax.random.key(1)
    )
    scores = logits(parameters, _whole([3, 1, 4]), config)[0, -1]
    want = np.asarray(jax.nn.softmax(scores / 1.5))
    share = np.bincount(drawn[:, 0], minlength=config.vocab_size) / many
    assert np.abs(share - want).max() < 5 * np.sqrt(want.max() / many)
    few = generate(parameters, config, [[3, 1, 4]] * 200, count=1, top_k=3, key=jax.random.key(1))
    assert set(few[:, 0]) == set(np.argsort(scores)[-3:].tolist())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": []}, "at least one prompt"),
        ({"prompts": [[1], []]}, "each of at least one token"),
        ({"prompts": [[1, 37]]}, "token 37 in a prompt is outside .*0 to 36"),
        ({"count": 0}, "count is 0"),
        ({"count": 16}, "take 17 positions, the model has learned 16"),
        ({"temperature": -1}, "temperature is -1"),
        ({"top_k": 0}, "top_k is 0, must be in 1 to 37"),
    ],
)
def test_refusals(change, message, random_parameters):
    config = FAMILIES["gpt3"]
    given = {"prompts": [[1, 2]], "count": 1, "key": jax.random.key(0)} | change
    with pytest.raises(UserError, match=message):
        generate(random_parameters(config, jnp.float32), config, **given)
