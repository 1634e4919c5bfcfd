"""Sample text of the trained model."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from geojax.data import Tokenizer
from geojax.models import ModelConfig, generate
from geojax.step.plan import StepPlan
from geojax.train.config import SampleSettings


def gather_full_params(shards: Any, layouts: Any, plan: StepPlan) -> Any:
    """Return the weights in the compute dtype, unsharded, on this process's first device.

    A collective: every process calls it. The weights must fit on one device.
    """
    everywhere = NamedSharding(plan.mesh, PartitionSpec())

    def gather(shards: Any) -> Any:
        return jax.tree.map(
            lambda leaf, leaf_layout: leaf_layout.trim(leaf.astype(plan.policy.compute_dtype)),
            shards,
            layouts,
        )

    unsharded = jax.jit(gather, out_shardings=everywhere)(shards)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), unsharded)


def sample_texts(
    weights: Any, model: ModelConfig, tokenizer: Tokenizer, settings: SampleSettings, seed: int
) -> list[str]:
    """Continue each prompt to the end of the document; the texts include the prompts."""
    starts = [[tokenizer.bos_id, *tokenizer.encode(prompt)] for prompt in settings.prompts]
    written = generate(
        weights,
        model,
        starts,
        count=settings.max_new_tokens,
        temperature=settings.temperature,
        key=jax.random.key(seed),
    ).tolist()
    texts = []
    for prompt, tokens in zip(settings.prompts, written, strict=True):
        end = tokens.index(tokenizer.eos_id) if tokenizer.eos_id in tokens else len(tokens)
        texts.append(prompt + tokenizer.decode(tokens[:end]))
    return texts
