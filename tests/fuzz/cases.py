"""Cases of the fuzz: what a user, a script or a damaged disk may hand to the `geojax` command.

Every case is drawn from a seed of its own, so that one can be run again: `python -m fuzz --only N`.
"""

import dataclasses
import gzip
import json
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from fuzz.values import ANYTHING, fields_of, hostile
from geojax.cli.main import _COMMANDS
from geojax.data.settings import PrepareSettings
from geojax.launch.hosts import Hosts
from geojax.pipeline.registry import SCHEDULES
from geojax.settings import Settings
from geojax.topology import Topology
from geojax.train.config.run_config import RunConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
READERS = ("train", "memory", "compile", "simulate", "probe")
"""Commands that read a run's config."""


@dataclasses.dataclass
class Case:
    """A command line with the files and the environment that it meets."""

    arguments: list[str]
    """Words after `geojax`; {work} stands for the case's folder."""
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    must_be_refused: bool = False

    def write(self, folder: Path) -> None:
        """Write the case's files into `folder`, and a few kinds that every case may name."""
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        os.mkfifo(folder / "fifo")
        (folder / "folder").mkdir()
        (folder / "empty.yaml").touch()
        (folder / "circle").symlink_to("circle")
        with socket.socket(socket.AF_UNIX) as listener:
            here = os.open(folder, os.O_RDONLY)
            listener.bind(f"/proc/self/fd/{here}/socket")
            os.close(here)
        with (folder / "huge.yaml").open("wb") as file:
            file.truncate(2**30)

    def __str__(self) -> str:
        words = " ".join(word if len(word) <= 90 else f"{word[:87]}..." for word in self.arguments)
        files = {name: len(content) for name, content in self.files.items()}
        return f"geojax {words!r} {self.environment or ''} {files or ''}"


class Cases:
    """Draws cases; `corpus` is a folder that `geojax data prepare` made."""

    def __init__(self, corpus: Path) -> None:
        self._configs = {
            path.name: path.read_bytes() for path in sorted(CONFIGS.glob("*.yaml"))
        } | {"small.yaml": yaml.safe_dump(_small(corpus)).encode()}
        self._models = {path.name: path.read_bytes() for path in sorted(CONFIGS.glob("model/*"))}
        self._topologies = {
            path.name: path.read_bytes() for path in sorted(CONFIGS.glob("topology/*"))
        }
        self._corpus = corpus
        self._kinds: list[tuple[float, Callable[[random.Random], Case]]] = [
            (6, self._field),
            (4, self._text),
            (1, self._kind_of_file),
            (3, self._option),
            (2, self._environment),
            (2, self._described_file),
            (3, self._documents),
            (1, self._words),
            (3, self._sizes),
        ]

    def draw(self, seed: int) -> Case:
        """Draw the case of `seed`."""
        rng = random.Random(seed)
        weights = [weight for weight, _ in self._kinds]
        (draw,) = rng.choices([draw for _, draw in self._kinds], weights)
        return draw(rng)

    def _config(self, rng: random.Random) -> tuple[str, bytes]:
        return rng.choice(list(self._configs.items()))

    def _field(self, rng: random.Random) -> Case:
        """One or two keys of a shipped config get values that their types or bounds exclude."""
        name, content = self._config(rng)
        fields = [field for field in fields_of(RunConfig) if field.path != ("run_directory",)]
        arguments, refused = [], False
        for _ in range(rng.choice([1, 1, 1, 2])):
            field = rng.choice(fields)
            value, never = hostile(field, rng)
            # What stands in a list or is replaced by a preset is not reached by an override.
            refused |= never
            arguments.append(f"--{'.'.join(field.path)}={value}")
        command = rng.choice(["train", "train", "memory", "compile", "simulate"])
        if len(arguments) > 1:  # the second may replace the group of the first
            refused = False
        return Case([command, name, *arguments], {name: content}, must_be_refused=refused)

    def _sizes(self, rng: random.Random) -> Case:
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
        name, content = self._config(rng)
        return Case([rng.choice(READERS), name, *arguments], {name: content})

    def _text(self, rng: random.Random) -> Case:
        """A shipped config with a few bytes changed, cut, repeated or put in."""
        name, content = self._config(rng)
        return Case([rng.choice(READERS), name], {name: _mutated(content, rng)})

    def _kind_of_file(self, rng: random.Random) -> Case:
        """Something other than a text file in place of a file."""
        kinds = [
            "fifo",
            "folder",
            "circle",
            "socket",
            "/dev/zero",
            "/dev/full",
            "/dev/null",
            "none",
        ]
        kinds += ["huge.yaml", "x" * 300, "empty.yaml", "/proc/self/mem", "\udcff.yaml", ""]
        kinds += ["/dev/fd/99", "binary.yaml", "empty.yaml/x"]
        kind = rng.choice(kinds)
        name, content = self._config(rng)
        files = {name: content, "binary.yaml": bytes(rng.randrange(256) for _ in range(3000))}
        place = rng.choice(
            [
                [rng.choice(READERS), kind],
                ["train", name, f"--topology={kind}/.yaml"],
                ["train", name, "--topology", kind if "/" in kind else f"./{kind}"],
                ["train", name, "--model", kind if "/" in kind else f"./{kind}"],
                ["train", name, f"--data.sources=[{{name: a, prepared: {json.dumps(kind)}}}]"],
                ["train", "small.yaml", f"--run_directory={kind}"],
                ["simulate", name, "--stage-times", kind],
                ["launch", "--hosts", kind, "--", "train", name],
                ["data", "prepare", kind, "--output", "out"],
                ["data", "prepare", name, "--output", "out", "--tokenizer", kind],
                ["data", "prepare", "--config", kind],
            ]
        )
        files["small.yaml"] = self._configs["small.yaml"]
        return Case(place, files)

    def _option(self, rng: random.Random) -> Case:
        """A subcommand whose options get hostile values."""
        command, settings = rng.choice(list(_COMMANDS.items()))
        name, content = self._config(rng)
        fields = [field for field in dataclasses.fields(settings) if field.name not in ("config",)]
        words = command.split()
        if "config" in {field.name for field in dataclasses.fields(settings)}:
            words.append(name)
        for _ in range(rng.choice([1, 1, 2])):
            if not fields:
                break
            option = f"--{rng.choice(fields).name.replace('_', '-')}"
            value = rng.choice(ANYTHING).replace("\0", "")
            words += rng.choice([[option, value], [f"{option}={value}"], [option], [option, "-5"]])
        if command == "launch":
            words += rng.choice(
                [[], ["--"], ["--", "train", name], ["--", "nope"], ["train", name]]
            )
        return Case(words, {name: content})

    def _environment(self, rng: random.Random) -> Case:
        """Variables that are misspelt or hold nonsense."""
        known = ["COORDINATOR", "PROCESS_COUNT", "PROCESS_ID", "PROCESS_OFFSET", "SITE"]
        known += ["SIMULATE_DEVICES", "START_TIMEOUT_SECONDS", "HEARTBEAT_TIMEOUT"]
        values = [value for value in ANYTHING if "\0" not in value and len(value) < 1000]
        misspelt = ["GEOJAX_HEARTBEAT", "GEOJAX_PROCES_ID", "GEOJAX_", "GEOJAX_SITES"]
        variable, refused = rng.choice(
            [
                (f"GEOJAX_{rng.choice(known)}", False),
                (f"GEOJAX_{rng.choice(known)}", False),
                (rng.choice(misspelt), True),
                ("NPROC", False),
                ("JAX_PLATFORMS", False),
                ("XLA_FLAGS", False),
            ]
        )
        value = rng.choice(values)
        if variable == "XLA_FLAGS":
            value, refused = rng.choice(
                [
                    ("--xla_no_such_flag=1", True),
                    ("--xla_cpu_collective_call_warn_stuck_timeout_seconds=x", True),
                    ("nonsense", False),
                    ("--xla_force_host_platform_device_count=-3", False),
                    ("--xla_force_host_platform_device_count=100000000", False),
                    (value, False),
                ]
            )
        environment = {variable: value}
        return Case(
            ["train", "small.yaml"],
            {"small.yaml": self._configs["small.yaml"]},
            environment,
            must_be_refused=refused,
        )

    def _described_file(self, rng: random.Random) -> Case:
        """A topology, model, host or stage-time file that is changed."""
        which = rng.choice(["topology", "model", "hosts", "prepare"])
        small = {"small.yaml": self._configs["small.yaml"]}
        if which in ("topology", "model"):
            shipped = self._topologies if which == "topology" else self._models
            content = rng.choice(list(shipped.values()))
            classes: dict[str, type[Settings]] = {"topology": Topology, "model": RunConfig}
            content = self._changed(content, classes[which], rng) if rng.random() < 0.5 else content
            content = _mutated(content, rng) if rng.random() < 0.5 else content
            arguments = [rng.choice(["train", "memory"]), "small.yaml", f"--{which}=./file.yaml"]
            return Case(arguments, small | {"file.yaml": content})
        if which == "hosts":
            example = {
                "sites": [{"name": "east", "hosts": ["a"]}, {"name": "west", "hosts": ["b"]}]
            }
            content = self._changed(yaml.safe_dump(example).encode(), Hosts, rng)
            return Case(
                ["launch", "--hosts", "file.yaml", "--", "train", "small.yaml"],
                small | {"file.yaml": content},
            )
        example = {"output": "out", "sources": [{"name": "a", "files": ["text.txt"]}]}
        content = self._changed(yaml.safe_dump(example).encode(), PrepareSettings, rng)
        files = {"file.yaml": content, "text.txt": b"one two three " * 50}
        return Case(["data", "prepare", "--config", "file.yaml"], files)

    def _changed(self, content: bytes, settings: type[Settings], rng: random.Random) -> bytes:
        """Return a YAML document with one of its values, or another of `settings`, made hostile."""
        document = yaml.safe_load(content)
        places: list[tuple[Any, Any]] = []

        def walk(value: Any) -> None:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, inner in list(items):
                places.append((value, key))
                if isinstance(inner, dict | list):
                    walk(inner)

        walk(document)
        owner, key = rng.choice(places)
        marker = "HOSTILE"
        owner[key] = marker
        if rng.random() < 0.3:
            document[rng.choice(list(settings.model_fields))] = marker
        return yaml.safe_dump(document).replace(marker, rng.choice(ANYTHING)).encode()

    def _documents(self, rng: random.Random) -> Case:
        """Files of documents that are damaged, endless or no documents, and hostile options."""
        line = json.dumps({"text": "one two three"}).encode() + b"\n"
        whole = gzip.compress(line * 200)
        damaged = bytearray(whole)
        damaged[len(damaged) // 2] ^= 0xFF
        name, content = rng.choice(
            [
                ("a.jsonl", line * 20),
                ("a.jsonl.gz", whole),
                ("a.jsonl.gz", whole[: len(whole) // 2]),
                ("a.jsonl.gz", bytes(damaged)),
                ("a.txt.gz", b"no gzip"),
                ("a.jsonl", b"[" * 300_000),
                ("a.jsonl", b'{"text": ' * 100_000),
                ("a.jsonl", b'{"text": ' + b"9" * 10_000 + b"}\n"),
                ("a.jsonl", b'{"text": "' + b"\\ud800" * 10 + b'"}\n'),
                ("a.jsonl", b'{"text": NaN}\n'),
                ("a.jsonl", b"null\n"),
                ("a.txt", b"\xff\xfe\x00"),
                ("a.txt", b""),
                ("a.txt", b"word " * 100_000),
                ("a.jsonl.gz", _bomb(b'{"text": "', b"a")),
                ("a.jsonl.gz", _bomb(b"", b" ")),
                ("a.txt.gz", _bomb(b"", b"\xff")),
                ("a.parquet", b"PAR1" + bytes(100)),
                ("a\nb.txt", b"x"),
            ]
        )
        words = ["data", "prepare", name, "--output", "out"]
        options = {
            "--vocab-size": ["300", "258", "257", "0", "-1", "100000000", "1e9", "x"],
            "--validation-fraction": ["0.1", "1", "-1", "nan", "1e-300", "x"],
            "--field": ["text", "", "other", "a\nb"],
            "--format": ["text", "jsonl", "parquet", ""],
            "--validation-files": [name, "none", "fifo", "folder"],
            "--beginning-token": ["<s>", ""],
        }
        if rng.random() < 0.5:
            option = rng.choice(list(options))
            words += [option, rng.choice(options[option])]
        return Case(words, {name: content})

    def _words(self, rng: random.Random) -> Case:
        """Command lines that are not quite commands."""
        name, content = self._config(rng)
        words = ["train", "memory", "data", "wan", "launch", "--", "--help", "-h", "--resume", name]
        words += [
            "trian",
            "help",
            "up",
            "prepare",
            "eval",
            "--version",
            "--steps",
            "5",
            "-5",
            "=",
            "",
        ]
        words += ["--a.b.c=1", "--.=1", "--data.sources.0.prepared", "x", "--model.preset", "tiny"]
        words += [f"--{'a.' * 2000}a=1", "\udcff", "--steps=\n", "@file", "--mesh", "{dc: 2}"]
        return Case([rng.choice(words) for _ in range(rng.randrange(1, 5))], {name: content})


def _mutated(content: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(content) + 1)
        upto = min(len(content), at + rng.choice([1, 5, 50]))
        junk = rng.choice([*ANYTHING, "\t", "\0", "\r", "---\n", "...\n", "<<: *x\n", "&x ", "  "])
        replacement = rng.choice(
            [b"", junk.encode(), content[at:upto] * 2, bytes([rng.randrange(256)]), b"\xff"]
        )
        content = content[:at] + replacement + content[rng.choice([at, upto]) :]
    return content


def _bomb(first: bytes, repeated: bytes, size: int = 2**30) -> bytes:
    """A gzip file of a few megabytes that is a line of a gigabyte, in members of 16 MiB."""
    block = gzip.compress(repeated * 2**24, compresslevel=1)
    return gzip.compress(first) + block * (size >> 24)


def _small(corpus: Path) -> dict[str, Any]:
    """A config of which all files are there."""
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
        "data": {"sources": [{"name": "sums", "prepared": str(corpus)}]},
        "batch": {"global_batch_size": 16, "sequence_length": 32},
        "precision": "fp32",
    }
