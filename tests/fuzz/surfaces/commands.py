"""Command lines: options and words that cannot be meant, and files that are no files."""

import json
import random

from fuzz.case import Case
from fuzz.corpus import Corpus
from fuzz.surfaces.run_configs import READERS
from fuzz.values import ANYTHING
from geojax.cli.arguments import arguments_of
from geojax.cli.verbs import VERBS, arguments_class


def option(corpus: Corpus, rng: random.Random) -> Case:
    """A subcommand whose options get hostile values."""
    command = rng.choice(list(VERBS))
    name, content = corpus.config(rng)
    names = [argument.name for argument in arguments_of(arguments_class(command))]
    words = command.split()
    if "config" in names:
        names.remove("config")
        words.append(name)
    for _ in range(rng.choice([1, 1, 2])):
        if not names:
            break
        option = f"--{rng.choice(names).replace('_', '-')}"
        value = rng.choice(ANYTHING).replace("\0", "")
        words += rng.choice([[option, value], [f"{option}={value}"], [option], [option, "-5"]])
    if command == "launch":
        words += rng.choice([[], ["--"], ["--", "train", name], ["--", "nope"], ["train", name]])
    return Case(words, {name: content})


def words(corpus: Corpus, rng: random.Random) -> Case:
    """Command lines that are not quite commands."""
    name, content = corpus.config(rng)
    words = ["train", "plan", "data", "config", "wan", "launch", "--", "--help", "-h", name]
    words += [
        "--resume",
        "trian",
        "help",
        "up",
        "prepare",
        "show",
        "diff",
        "optimizer",
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


def kind_of_file(corpus: Corpus, rng: random.Random) -> Case:
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
    name, content = corpus.config(rng)
    files = {name: content, "binary.yaml": bytes(rng.randrange(256) for _ in range(3000))}
    place = rng.choice(
        [
            [*rng.choice(READERS), kind],
            ["train", name, f"--topology={kind}/.yaml"],
            ["train", name, "--topology", kind if "/" in kind else f"./{kind}"],
            ["train", name, "--model", kind if "/" in kind else f"./{kind}"],
            ["train", name, f"--data.sources=[{{name: a, prepared: {json.dumps(kind)}}}]"],
            ["train", "small.yaml", f"--run_directory={kind}"],
            ["plan", name, "--schedules", "--stage-times", kind],
            ["config", "diff", name, kind],
            ["config", "new", "--output", kind],
            ["train", "based.yaml"],
            ["launch", "--hosts", kind, "--", "train", name],
            ["data", "prepare", kind, "--output", "out"],
            ["data", "prepare", name, "--output", "out", "--tokenizer", kind],
            ["data", "prepare", "--config", kind],
        ]
    )
    files["small.yaml"] = corpus.configs["small.yaml"]
    files["based.yaml"] = f"base: {json.dumps(kind)}\n".encode() + content
    return Case(place, files)


DRAWS = ((3, option), (1, words), (1, kind_of_file))
