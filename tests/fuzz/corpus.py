"""Files that cases start from: shipped configs, prepared text, a tokenizer, and saved runs.

Text is prepared and runs are trained in children: both start threads, which no fork copies.
"""

import functools
import os
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SOURCE = "sums"
RUNS = ("run", "islands")
"""Saved runs of one program: the sites of the first have saved together, those of the second each
by itself, as islands do."""
STEPS = 2


class Corpus(NamedTuple):
    """Files that cases start from, by their paths in a case's folder."""

    configs: dict[str, bytes]
    """The shipped configs of runs, and small.yaml."""
    models: dict[str, bytes]
    topologies: dict[str, bytes]
    prepared: dict[str, bytes]
    """A folder that `geojax data prepare` made, as `data/...`."""
    tokenizer: dict[str, bytes]
    """A tokenizer of conversations with its template, as `chat/...`."""
    runs: dict[str, dict[str, bytes]]
    """Folders of saved runs by their names, of `RUNS`, and the config of each."""

    @classmethod
    def make(cls, folder: Path) -> "Corpus":
        """Prepare and train what is not shipped below `folder`."""
        _in_children(functools.partial(_prepare, folder))
        _in_children(*(functools.partial(_train, folder, name) for name in RUNS))
        configs = {path.name: path.read_bytes() for path in sorted(CONFIGS.glob("*.yaml"))}
        configs["small.yaml"] = yaml.safe_dump(small_config(folder / SOURCE)).encode()
        runs = {
            name: _files(folder / name, name)
            | {f"{name}.yaml": (folder / f"{name}.yaml").read_bytes()}
            for name in RUNS
        }
        return cls(
            configs,
            {path.name: path.read_bytes() for path in sorted(CONFIGS.glob("model/*"))},
            {path.name: path.read_bytes() for path in sorted(CONFIGS.glob("topology/*"))},
            _files(folder / SOURCE, "data"),
            _files(folder / "chat", "chat"),
            runs,
        )

    def config(self, rng: random.Random) -> tuple[str, bytes]:
        """Draw the name and the text of a run's config."""
        return rng.choice(list(self.configs.items()))


def small_config(prepared: Path) -> dict[str, Any]:
    """Return a config of which all files are there."""
    return {
        "run_directory": "run",
        "steps": 20,
        "simulate_devices": 8,
        "topology": "simulated-2x4",
        "mesh": {"dc": 2, "data": 4},
        "model": {
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "vocab_size": 512,
            "max_position_embeddings": 64,
        },
        "data": {"sources": [{"name": SOURCE, "prepared": str(prepared)}]},
        "batch": {"global_batch_size": 16, "sequence_length": 32},
        "precision": "fp32",
    }


def _files(folder: Path, name: str) -> dict[str, bytes]:
    return {
        str(Path(name) / path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".png"
    }


def _in_children(*works: Callable[[], None]) -> None:
    children = []
    for work in works:
        children.append(os.fork())
        if children[-1] == 0:
            code = 1
            try:
                work()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    assert not any(statuses), "the corpus could not be made"


def _prepare(folder: Path) -> None:
    from support.chats import write_tokenizer
    from support.small_runs import prepare_corpus

    prepare_corpus(folder)
    (folder / "chat").mkdir()
    write_tokenizer(folder / "chat")


def _train(folder: Path, name: str) -> None:
    """Train a run for a few steps on two simulated devices."""
    from support.xla_flags import COMPILE_FAST

    from geojax.cli.main import run

    os.chdir(folder)
    os.environ["XLA_FLAGS"] = COMPILE_FAST
    os.dup2(os.open(folder / f"{name}.log", os.O_RDWR | os.O_CREAT), 1)
    small = small_config(folder / SOURCE)
    config = small | {
        "run_directory": name,
        "steps": STEPS,
        "simulate_devices": 2,
        "topology": None,
        "mesh": {"dc": 2},
        "model": small["model"] | {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 304},
        "batch": {"global_batch_size": 2, "sequence_length": 32},
        "evaluation": {"sequences": 2},
        "checkpoint": {"interval": 1, "per_site": name == "islands"},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    assert run(["train", str(path)]) == 0, (folder / f"{name}.log").read_text()
