"""Saved runs, damaged or not, gone on with or put to work with hostile options."""

import json
import random
from collections.abc import Sequence

from fuzz.case import KINDS, Case
from fuzz.corpus import RUNS, Corpus
from fuzz.damage import JSON_VALUES, flipped, harm, mutated
from fuzz.values import ANYTHING

_NUMBERS = ("0", "-1", "1", "2", "7", "1000000000", "99999999999999999999", "nan", "x", "", "1e3")
_PATHS = (
    "out",
    ".",
    "..",
    "",
    "/",
    "/proc/x",
    "/dev/null",
    "/dev/full",
    "fifo",
    "folder",
    "empty.yaml",
    "empty.yaml/x",
    "circle",
    "huge.yaml",
    "~nouser/x",
    "none/out",
    "x" * 300,
    "a\nb",
    "data",
    "chat",
    "run",
    "islands",
)
_MESH = {"--mesh.data": _NUMBERS, "--mesh.tensor": _NUMBERS, "--mesh.expert": _NUMBERS}
_SERVING = _MESH | {
    "--step": _NUMBERS,
    "--batch-size": _NUMBERS,
    "--dtype": ("float64", "float16", "bfloat16", "int8", ""),
    "--tokenizer": ("chat/tokenizer.json", "data/tokenizer.json", *_PATHS),
}
_OPTIONS = {
    "generate": _SERVING
    | {
        "--prompt": ("", "x", "one is " * 20, "x " * 50_000, "\N{PILE OF POO}" * 1000, "<|end|>"),
        "--max-tokens": _NUMBERS,
        "--temperature": (*_NUMBERS, "-0.0", "inf", "1e-300"),
        "--top-p": (*_NUMBERS, "0.5", "inf", "1e-300"),
        "--seed": _NUMBERS,
    },
    "evaluate": _SERVING
    | {
        "--data": _PATHS,
        "--sequences": _NUMBERS,
        "--limit": _NUMBERS,
        "--num-fewshot": _NUMBERS,
        "--task-folder": _PATHS,
        "--output": _PATHS,
    },
    "export": {
        "--output": _PATHS,
        "--step": _NUMBERS,
        "--dtype": ("float64", "float16", "bfloat16", "int8", ""),
        "--tokenizer": ("chat/tokenizer.json", "data/tokenizer.json", *_PATHS),
        "--adapter": (),
    },
    "watch": {"--once": ()},
    "report": {"--output": _PATHS},
}
_NEEDED = {
    "generate": ["--prompt", "1 is", "--max-tokens", "4"],
    "evaluate": [],
    "export": ["--output", "out"],
    "watch": ["--once"],
    "report": ["--output", "out"],
}


def options(corpus: Corpus, rng: random.Random) -> Case:
    """A whole run, and hostile options of what puts it to work."""
    name, command = rng.choice(RUNS), rng.choice(list(_OPTIONS))
    words = [command, rng.choice([name, name, name, name, *_PATHS]), *_NEEDED[command]]
    for _ in range(rng.choice([1, 1, 2])):
        option, values = rng.choice(list(_OPTIONS[command].items()))
        if not values or rng.random() < 0.05:
            words.append(option)
            continue
        value = rng.choice(values) if rng.random() < 0.85 else rng.choice(ANYTHING)
        words += rng.choice([[option, value], [f"{option}={value}"]])
    words = [word.replace("\0", "") for word in words]
    files = corpus.runs[name] | corpus.tokenizer | corpus.prepared
    return Case(words, files, notes=True)


def damaged(corpus: Corpus, rng: random.Random) -> Case:
    """A run of which files are damaged, gone on with, read, or exported."""
    name = rng.choice(RUNS)
    files = dict(corpus.runs[name])
    command = rng.choice(["train", "train", *_NEEDED])
    words = [command, name, *_NEEDED.get(command, [])]
    if command == "train":
        words = ["train", f"{name}.yaml", "--steps", "3", *rng.choice([[], ["--resume"]])]
    case = Case(words, files, notes=True, writes=(name,))
    of_run = [each for each in files if each.startswith(f"{name}/")]
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        chosen = _one_of(rng, of_run, "manifest.json", "_METADATA", "config.yaml", "metrics.jsonl")
        if chosen in case.files and chosen not in case.kinds:
            _harm(case, chosen, rng)
    return case


def _one_of(rng: random.Random, names: Sequence[str], *often: str) -> str:
    """Draw a file; those that end with one of `often` are drawn half of the time."""
    chosen = [name for name in names if name.endswith(often)]
    return rng.choice(chosen if chosen and rng.random() < 0.5 else list(names))


def _harm(case: Case, name: str, rng: random.Random) -> None:
    content = case.files[name]
    if name.endswith("metrics.jsonl") and rng.random() < 0.5:
        line = json.dumps({"step": rng.choice(JSON_VALUES), "loss": rng.choice(JSON_VALUES)})
        case.files[name] = rng.choice([content + line.encode() + b"\n", line.encode() + content])
    elif name.endswith(("config.yaml", "step.yaml")) and rng.random() < 0.5:
        case.files[name] = mutated(content, rng)
    elif rng.random() < 0.2:
        case.kinds[name] = rng.choice(KINDS)
    elif name.endswith((".json", ".jsonl", ".yaml")):
        harm(case, name, rng)
    else:
        case.files[name] = flipped(content, rng)


def told(corpus: Corpus, rng: random.Random) -> Case:
    """A run whose records are somebody's, watched or reported."""
    name = rng.choice(RUNS)
    files = dict(corpus.runs[name])
    values = [*JSON_VALUES, *ANYTHING]
    keys = ("step", "time", "kind", "text", "attempt", "began", "ended", "seconds", "outcome")
    keys += ("waiting_for", "loss", "link/west/wait_seconds", "site/west/age_seconds", "mfu")
    keys += ("validation/x\x1b[2J", "slowest/process", "slowest/seconds", "tokens_per_second")
    for file in ("events.jsonl", "goodput.jsonl", "goodput-now.json", "metrics.jsonl"):
        lines = [
            {"step": 1, "attempt": 1, "began": 1.0}
            | {rng.choice(keys): rng.choice(values) for _ in range(rng.randrange(1, 5))}
            for _ in range(rng.randrange(1, 4))
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        folder = rng.choice(["", "", "west/", "checkpoints/", "a b/"])
        files[f"{name}/{folder}{file}"] = text.encode(errors="surrogatepass")
    words = rng.choice([["watch", name, "--once"], ["report", name], ["report", name, name]])
    return Case(words, files, notes=True, writes=("report.html",))


def folders(corpus: Corpus, rng: random.Random) -> Case:
    """A run whose folders are gone, moved or locked, under names that lead elsewhere."""
    name = rng.choice(RUNS)
    files = dict(corpus.runs[name])
    command = rng.choice(["train", *_NEEDED])
    words = [command, name, *_NEEDED.get(command, [])]
    if command == "train":
        words = ["train", f"{name}.yaml", "--steps", "3"]
    case = Case(words, files, notes=True, writes=(name,))
    change = rng.choice(["step", "rename", "site", "lock", "held", "earlier", "path"])
    prefix = f"{name}/checkpoints/" + ("site1/" if name == "islands" else "")
    if change == "step":
        _move(files, f"{prefix}2/", None)
    elif change == "rename":
        _move(files, f"{prefix}2/", prefix + rng.choice(["9/", "02/", "-1/", "x/", f"{10**30}/"]))
    elif change == "site":
        _move(files, prefix, rng.choice([None, f"{name}/checkpoints/other/"]))
    elif change == "lock":
        files[f"{name}/lock"] = rng.choice([b"\xff\xfe", b"x" * 5000, b"", b"a\nb\n"])
    elif change == "held":
        files[f"{name}/lock"] = rng.choice([b"\xff\xfe", b"x" * 5000, b"", b"process 1 on a\n"])
        case.held = (f"{name}/lock",)
    elif change == "earlier":
        steps = rng.choice(["1", "2", "0", "-1"])
        case.arguments += ["--steps", steps] if command == "train" else []
    else:
        other = rng.choice(
            [f"{name}/../{name}", f"./{name}//", f"folder/../{name}/.", "~", "${HOME}"]
        )
        if command == "train":
            case.arguments += ["--run_directory", other]
        else:
            case.arguments[1] = other
        case.writes = (name, "~", "${HOME}")
    return case


def _move(files: dict[str, bytes], prefix: str, target: str | None) -> None:
    """Rename what lies below `prefix`, or take it away."""
    for name in [name for name in files if name.startswith(prefix)]:
        content = files.pop(name)
        if target is not None:
            files[target + name.removeprefix(prefix)] = content


DRAWS = ((4, options), (4, damaged), (2, told), (2, folders))
