"""Files that describe a topology, a model, hosts or data to be prepared."""

import random

import yaml

from fuzz.case import Case
from fuzz.corpus import Corpus
from fuzz.damage import mutated, places_of
from fuzz.values import ANYTHING
from geojax.config.run_config import RunConfig
from geojax.data.settings import PrepareSettings
from geojax.launch.hosts import Hosts
from geojax.settings import Settings
from geojax.topology import Topology


def described_file(corpus: Corpus, rng: random.Random) -> Case:
    """A topology, model, host or stage-time file that is changed."""
    which = rng.choice(["topology", "model", "hosts", "prepare"])
    small = {"small.yaml": corpus.configs["small.yaml"]}
    if which in ("topology", "model"):
        shipped = corpus.topologies if which == "topology" else corpus.models
        content = rng.choice(list(shipped.values()))
        classes: dict[str, type[Settings]] = {"topology": Topology, "model": RunConfig}
        content = _changed(content, classes[which], rng) if rng.random() < 0.5 else content
        content = mutated(content, rng) if rng.random() < 0.5 else content
        arguments = [rng.choice(["train", "plan"]), "small.yaml", f"--{which}=./file.yaml"]
        return Case(arguments, small | {"file.yaml": content})
    if which == "hosts":
        example = {"sites": [{"name": "east", "hosts": ["a"]}, {"name": "west", "hosts": ["b"]}]}
        content = _changed(yaml.safe_dump(example).encode(), Hosts, rng)
        return Case(
            ["launch", "--hosts", "file.yaml", "--", "train", "small.yaml"],
            small | {"file.yaml": content},
        )
    example = {"output": "out", "sources": [{"name": "a", "files": ["text.txt"]}]}
    content = _changed(yaml.safe_dump(example).encode(), PrepareSettings, rng)
    files = {"file.yaml": content, "text.txt": b"one two three " * 50}
    return Case(["data", "prepare", "--config", "file.yaml"], files, notes=True)


def _changed(content: bytes, settings: type[Settings], rng: random.Random) -> bytes:
    """Return a YAML document with one of its values, or another of `settings`, made hostile."""
    document = yaml.safe_load(content)
    owner, key = rng.choice(places_of(document))
    marker = "HOSTILE"
    owner[key] = marker
    if rng.random() < 0.3:
        document[rng.choice(list(settings.model_fields))] = marker
    return yaml.safe_dump(document).replace(marker, rng.choice(ANYTHING)).encode()


DRAWS = ((2, described_file),)
