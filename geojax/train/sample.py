"""Text that the trained model writes."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from geojax.collectives import all_gather
from geojax.data import Tokenizer
from geojax.models import ModelConfig, generate
from geojax.optim import SHARD_AXES
from geojax.train.config import SampleSettings
from geojax.train.state import TrainState
from geojax.train.step import StepPlan


def whole_weights(state: TrainState, layouts: TrainState, plan: StepPlan) -> Any:
    """The weights in the compute dtype, whole, on this process's first device.

    A collective: every process calls it. The weights must fit on one device.
    """
    places = layouts.parameters
    gather = jax.shard_map(
        lambda shards: all_gather(
            shards,
            SHARD_AXES,
            dims=jax.tree.map(lambda place: place.dim, places),
            shapes=jax.tree.map(lambda place: place.shape, places),
            dtype=plan.policy.compute_dtype,
            to="invarying",
        ),
        mesh=plan.mesh,
        in_specs=(jax.tree.map(lambda place: place.spec(), places),),
        out_specs=PartitionSpec(),
        check_vma=True,
    )
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), jax.jit(gather)(state.parameters))


def sample_texts(
    weights: Any, model: ModelConfig, tokenizer: Tokenizer, settings: SampleSettings, seed: int
) -> list[str]:
    """One text for each prompt, the prompt included; a text ends with its document."""
    starts = [[tokenizer.bos_id, *tokenizer.encode(prompt)] for prompt in settings.prompts]
    written = generate(
        weights,
        model,
        starts,
        count=settings.tokens,
        temperature=settings.temperature,
        key=jax.random.key(seed),
    ).tolist()
    texts = []
    for prompt, tokens in zip(settings.prompts, written, strict=True):
        end = tokens.index(tokenizer.eos_id) if tokenizer.eos_id in tokens else len(tokens)
        texts.append(prompt + tokenizer.decode(tokens[:end]))
    return texts
