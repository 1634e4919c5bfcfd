"""The config of a run: keys and sizes that cannot be, and text that is no YAML."""

import random

from fuzz.case import Case
from fuzz.corpus import Corpus
from fuzz.damage import mutated
from fuzz.values import fields_of, hostile
from geojax.config.run_config import RunConfig
from geojax.pipeline.registry import SCHEDULES

READERS = (
    ("train",),
    ("plan",),
    ("plan", "--compile"),
    ("plan", "--schedules"),
    ("data", "show"),
    ("config", "show"),
    ("probe",),
)
"""Commands that read a run's config."""


def wrong_field(corpus: Corpus, rng: random.Random) -> Case:
    """One or two keys of a shipped config get values that their types or bounds exclude."""
    name, content = corpus.config(rng)
    fields = [field for field in fields_of(RunConfig) if field.path != ("run_directory",)]
    arguments, refused = [], False
    for _ in range(rng.choice([1, 1, 1, 2])):
        field = rng.choice(fields)
        value, never = hostile(field, rng)
        # What stands in a list or is replaced by a preset is not reached by an override.
        refused |= never
        arguments.append(f"--{'.'.join(field.path)}={value}")
    command = rng.choice([("train",), *READERS[:-1]])
    if len(arguments) > 1:  # the second may replace the group of the first
        refused = False
    return Case([*command, name, *arguments], {name: content}, must_be_refused=refused)


def sizes(corpus: Corpus, rng: random.Random) -> Case:
    """Sizes that fit each other, up to the largest that are allowed."""
    powers = {
        "model.num_hidden_layers": 11,
        "model.num_attention_heads": 14,
        "model.num_experts": 14,
        "model.vocab_size": 24,
        "model.max_position_embeddings": 28,
        "batch.sequence_length": 28,
        "batch.global_batch_size": 20,
        "batch.microbatches": 20,
        "mesh.stage": 14,
        "mesh.data": 17,
        "mesh.tensor": 14,
        "mesh.context": 14,
        "pipeline.virtual_stages": 14,
        "pipeline.memory_limit": 20,
        "pipeline.hop_ticks": 10,
        "evaluation.sequences": 20,
        "simulate_devices": 12,
    }
    chosen = rng.sample(list(powers), rng.randrange(1, 6))
    arguments = [f"--{key}={2 ** rng.randrange(powers[key] + 1)}" for key in chosen]
    if "batch.microbatches" in chosen and rng.random() < 0.8:
        arguments.append(f"--batch.global_batch_size={2**20}")
    if "model.num_experts" in chosen:
        arguments.append("--model.num_experts_per_tok=1")
    schedule = rng.choice(list(SCHEDULES))
    arguments += rng.choice([[], ["--dc.role=stage", f"--pipeline.schedule={schedule}"]])
    name, content = corpus.config(rng)
    return Case([*rng.choice(READERS), name, *arguments], {name: content})


def text(corpus: Corpus, rng: random.Random) -> Case:
    """A shipped config with a few bytes changed, cut, repeated or put in."""
    name, content = corpus.config(rng)
    return Case([*rng.choice(READERS), name], {name: mutated(content, rng)})


DRAWS = ((6, wrong_field), (4, text), (3, sizes))
