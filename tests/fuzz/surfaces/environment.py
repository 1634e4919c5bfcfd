"""Variables of the environment that are misspelt or hold nonsense."""

import random

from fuzz.case import Case
from fuzz.corpus import Corpus
from fuzz.values import ANYTHING


def environment(corpus: Corpus, rng: random.Random) -> Case:
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
        {"small.yaml": corpus.configs["small.yaml"]},
        environment,
        must_be_refused=refused,
    )


_COORDINATORS = (
    "localhost:99999",
    "localhost:0",
    "localhost:\N{ARABIC-INDIC DIGIT THREE}\N{ARABIC-INDIC DIGIT THREE}",
    "127.0.0.1:-5",
    "nowhere.invalid:5000",
    "[::1:5000",
    "::1:5000",
    "[::1]:5000",
    "..:5000",
    f"{'a' * 64}.invalid:5000",
    "$(x):5",
    "-x:5",
    "8.8.8.8:5000",
    "127.0.0.1:5000 ",
    ":5000",
    "localhost",
    "http://localhost:5000",
)
_ADDRESSES = (
    "localhost",
    "x",
    "127.0.0.1:5",
    "1.2.3",
    "127.1",
    "127.0.0.1\n",
    "8.8.8.8",
    "0.0.0.0",
    "::1",
    "fe80::1%lo",
    "255.255.255.255",
    "nowhere.invalid",
    "a" * 64,
    "..",
)
_SITES = (
    "../../esc",
    "a/b",
    ".",
    "..",
    "x;touch y",
    "-1",
    "\N{FULLWIDTH DIGIT TWO}",
    "a b",
    "x" * 300,
    "a\nb",
    "CON",
    "east.",
)
_COUNTS = ("0", "-1", "2", "3", "99999999999", "x", "1.5", " 1", "\N{ARABIC-INDIC DIGIT THREE}")
_KEYS = ("short", "x" * 65, "\N{PILE OF POO}" * 16, " " * 16, "a\nb" * 6)
_ISLANDS: dict[str, tuple[str, ...]] = {
    "GEOJAX_SITE": _SITES,
    "GEOJAX_ISLANDS": (
        "east",
        "east,east",
        "east, west",
        "east,",
        ",",
        "east,west,north",
        "../../esc,west",
        ",".join(f"site{number}" for number in range(5000)),
        *(f"{site},east" for site in _SITES),
    ),
    "GEOJAX_ISLANDS_COORDINATORS": _COORDINATORS,
    "GEOJAX_KEY": _KEYS,
    "GEOJAX_ISLANDS_ADDRESS": _ADDRESSES,
    "GEOJAX_ISLANDS_PORT": ("0", "-1", "65535", "65536", "x", "1", "99999999999"),
}
_PROCESSES: dict[str, tuple[str, ...]] = {
    "GEOJAX_COORDINATOR": _COORDINATORS,
    "GEOJAX_KEY": _KEYS,
    "GEOJAX_BIND_ADDRESS": _ADDRESSES,
    "GEOJAX_PROCESS_COUNT": _COUNTS,
    "GEOJAX_PROCESS_ID": _COUNTS,
    "GEOJAX_PROCESS_OFFSET": _COUNTS,
    "GEOJAX_SITE": _SITES,
    "GEOJAX_SIMULATE_DEVICES": _COUNTS,
    "GEOJAX_START_TIMEOUT_SECONDS": (*_COUNTS, "nan", "inf", "1h"),
    "GEOJAX_HEARTBEAT_TIMEOUT": (*_COUNTS, "nan", "inf", "1h"),
    "SLURM_STEP_NUM_TASKS": _COUNTS,
    "SLURM_PROCID": _COUNTS,
    "SLURM_JOB_ID": _COUNTS,
    "SLURM_STEP_NODELIST": ("n[1-", "[", "", "n[001-004,7],m1", "x" * 3000, "a\nb"),
    "JOB_COMPLETION_INDEX": _COUNTS,
}


def _draw_values(
    variables: dict[str, tuple[str, ...]], given: dict[str, str], rng: random.Random
) -> dict[str, str]:
    """Return `given` with one or two of the variables taken away or made hostile."""
    changed = dict(given)
    for name in rng.choices(list(variables), k=rng.choice([1, 1, 2])):
        if rng.random() < 0.1:
            changed.pop(name, None)
            continue
        anything = [value for value in ANYTHING if "\0" not in value and len(value) < 1000]
        changed[name] = rng.choice(variables[name] if rng.random() < 0.8 else anything)
    return changed


_REFUSED = {
    *(each for each in _COORDINATORS if each not in ("nowhere.invalid:5000", "[::1]:5000")),
    *(each for each in _SITES if each != "CON"),
} - {"8.8.8.8:5000", "::1:5000"}
"""Coordinators and sites that nobody may accept."""


def _must_be_refused(environment: dict[str, str]) -> bool:
    """Return whether a variable that is read holds what nobody may accept."""
    names = ("GEOJAX_ISLANDS_COORDINATORS", "GEOJAX_COORDINATOR", "GEOJAX_SITE")
    return any(environment.get(name) in _REFUSED for name in names)


def islands(corpus: Corpus, rng: random.Random) -> Case:
    """The variables of a site among sites that are jobs of their own."""
    given = {
        "GEOJAX_SITE": rng.choice(["east", "west"]),
        "GEOJAX_ISLANDS": "east,west",
        "GEOJAX_ISLANDS_COORDINATORS": "127.0.0.1:61439",
        "GEOJAX_KEY": "0123456789abcdef",
        "GEOJAX_ISLANDS_ADDRESS": "127.0.0.1",
        "GEOJAX_START_TIMEOUT_SECONDS": "5",
    }
    words = ["train", "small.yaml", "--dc.join=islands", "--topology=null", "--simulate_devices=4"]
    if rng.random() < 0.1:
        words += ["--site", rng.choice(_SITES)]
    drawn = _draw_values(_ISLANDS, given, rng)
    return Case(
        words,
        {"small.yaml": corpus.configs["small.yaml"]},
        drawn,
        must_be_refused=len(words) == 5 and _must_be_refused(drawn),
        writes=("run",),
    )


def processes(corpus: Corpus, rng: random.Random) -> Case:
    """The variables of a process among several of one program, or its options."""
    given = {
        "GEOJAX_COORDINATOR": "127.0.0.1:61440",
        "GEOJAX_PROCESS_COUNT": "2",
        "GEOJAX_PROCESS_ID": rng.choice(["0", "1"]),
        "GEOJAX_START_TIMEOUT_SECONDS": "5",
    }
    words = ["train", "small.yaml"]
    if rng.random() < 0.3:
        option, values = rng.choice(
            [
                ("--coordinator", _COORDINATORS),
                ("--process-count", _COUNTS),
                ("--process-id", _COUNTS),
                ("--site", _SITES),
            ]
        )
        words += [f"{option}={rng.choice(values)}"]
        given = rng.choice([given, {}])
    drawn = _draw_values(_PROCESSES, given, rng)
    return Case(
        words,
        {"small.yaml": corpus.configs["small.yaml"]},
        drawn,
        must_be_refused=len(words) == 2 and _must_be_refused(drawn),
        notes=True,  # that there is no key
    )


DRAWS = ((2, environment), (3, islands), (2, processes))
