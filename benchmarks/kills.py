"""Ten kills of a run of three sites: what each costs in geojax and in torchft, side by side.

    python benchmarks/kills.py                                   # as root, on Linux
    python benchmarks/kills.py --torchft-python VENV/bin/python  # that has torch and torchft

Both train one model on the same text: three sites, each in a network namespace that sends at a
rate, and in a cgroup of half a core. Three kills strike the first site, three what leads the others
(torchft's lighthouse, the holder of geojax's record), four a drawn site. The next one comes ten
seconds after all sites train together again.

A kill costs the time in which the run would have trained on as many tokens as it lacks: that counts
the pause, the steps at fewer sites, those done again, and what slows the others while one returns.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from chaos_faults.half_cores import quotas
from chaos_faults.routed_sites import RoutedSites, routed_sites
from kill_sides.geojax_run import GeojaxRun
from kill_sides.progress import Done, Progress
from kill_sides.torchft_run import TorchftRun
from kill_sides.work import MICROBATCHES, MODEL, OPTIMIZER, ROWS, SEQUENCE, SITES
from support.processes import end_by_exceptions
from support.small_runs import write_config
from worker import imports

from geojax.config.run_config import RunConfig
from geojax.data import Corpus, PrepareSettings, prepare
from geojax.train.opened_run import open_loader

OUTPUT = Path(__file__).parent / "results" / "kills.json"
MEGABITS, CORES = 40.0, 0.5
CALM_SECONDS, PAUSE_SECONDS, PATIENCE_SECONDS = 60.0, 10.0, 180.0
BATCHES = 2000
"""Batches of the text; later ones are the first again."""
SAVE_INTERVAL = 100


class Side(Protocol):
    """A run of three sites, of which some can be killed."""

    def start(self) -> None: ...

    def end(self) -> None: ...

    def kill(self, site: int) -> None: ...

    def kill_head(self) -> int | None:
        """End what leads the others; return the site that falls out with it."""
        ...

    def new_steps(self) -> list[Done]: ...


def drawn_kills(count: int, seed: int) -> list[str]:
    """Return what each kill strikes: "first", "head" or the name of a site."""
    numbers = random.Random(seed)
    others = [numbers.choice(SITES[1:]) for _ in range(max(count - 6, 0))]
    kills = (["first"] * 3 + ["head"] * 3 + others)[:count]
    numbers.shuffle(kills)
    return kills


def small_config(folder: Path) -> Path:
    """Write the run's config and its text; return the config's path."""
    words = " ".join(f"{word} is {word * word % 97}" for word in range(4000))
    text = folder / "text.jsonl"
    lines = [json.dumps({"text": f"{number} {words[number:]}"}) for number in range(20)]
    text.write_text("\n".join(lines))
    source = {"name": "sums", "files": (str(text),), "validation_fraction": 0.1}
    settings = PrepareSettings(output=folder, sources=(source,), vocab_size=300)
    corpus = prepare(settings)[0].folder
    return write_config(
        folder / "run.yaml",
        corpus,
        steps=1_000_000,
        simulate_devices=1,
        mesh={"dc": len(SITES)},
        dc={"join": "islands"},
        islands={"on_loss": "go_on", "lease": {"path": str(folder / "membership.json")}},
        model=MODEL,
        batch={
            "global_batch_size": ROWS,
            "sequence_length": SEQUENCE,
            "microbatches": MICROBATCHES,
        },
        optimizer=OPTIMIZER,
        evaluation={"interval": 1_000_000, "sequences": 12},
        checkpoint={"interval": SAVE_INTERVAL, "keep": 3},
    )


def write_batches(config: Path, path: Path) -> None:
    """Write the batches that geojax trains on, [batches, rows, sequence + 1], for torchft."""
    run = RunConfig.load(config)
    loader = open_loader(run, Corpus.open(run.data, None, progress=False), list(range(ROWS)))
    batches = loader.iterate(0)
    whole = np.empty((BATCHES, ROWS, SEQUENCE + 1), np.int16)
    for number in range(BATCHES):
        batch = next(batches)
        whole[number, :, :-1], whole[number, :, -1] = batch["tokens"], batch["targets"][:, -1]
    np.save(path, whole)


def wait(side: Side, progress: Progress, since: float, seconds: float) -> bool:
    """Wait until all sites train together after a time; False: they do not."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.1)
        progress.add(side.new_steps())
        if progress.are_level(since):
            return True
    return False


def watched(side: Side, kills: list[str], say: Any) -> dict[str, Any]:
    """Kill a side's sites, one after the other; return the figures."""
    progress = Progress()
    if not wait(side, progress, 0.0, PATIENCE_SECONDS):
        raise SystemExit("the sites do not train; --folder keeps their logs")
    began = time.time()
    time.sleep(CALM_SECONDS)
    progress.add(side.new_steps())
    calm = progress.tokens_per_second(began, time.time())
    say(f"  without kills {calm:.0f} tokens/s")
    first = time.time()
    records = []
    for number, target in enumerate(kills, 1):
        struck = time.time()
        if target == "head":
            fallen = side.kill_head()
        else:
            fallen = 0 if target == "first" else SITES.index(target)
            side.kill(fallen)
        # A site that trains on has to have noticed first.
        is_back = wait(side, progress, struck + 2.0, PATIENCE_SECONDS)
        back = time.time()
        record = {
            "target": target,
            "site": None if fallen is None else SITES[fallen],
            "longest_pause_seconds": progress.longest_pause(struck, back),
            "back_seconds": back - struck if is_back else None,
        }
        records.append(record)
        say(
            f"  {number}. {target}: longest pause {record['longest_pause_seconds']:.1f} s, "
            + (f"all train again after {back - struck:.0f} s" if is_back else "not back")
        )
        time.sleep(PAUSE_SECONDS)
        progress.add(side.new_steps())
    seconds = time.time() - first
    trained = progress.tokens_per_second(first, first + seconds) * seconds
    return {
        "calm_tokens_per_second": calm,
        "tokens_per_second": trained / seconds,
        "seconds_lost_a_kill": (seconds - trained / calm) / len(kills),
        "kills": records,
        "progress": progress,
    }


@contextlib.contextmanager
def sites(name: str, megabits: float) -> Iterator[tuple[RoutedSites, list[Path] | None]]:
    """Make namespaces and cgroups of three sites."""
    with (
        routed_sites(name, len(SITES), 1e6 * megabits) as network,
        quotas([f"{name}-{site}" for site in SITES], CORES) as groups,
    ):
        yield network, groups


def shown(figures: dict[str, dict[str, Any]]) -> Table:
    """Return the table of both sides."""
    table = Table("", *figures)
    kills = {name: side["kills"] for name, side in figures.items()}
    backs = {
        name: [kill["back_seconds"] for kill in of_side if kill["back_seconds"] is not None]
        for name, of_side in kills.items()
    }
    pauses = {
        name: [kill["longest_pause_seconds"] for kill in of_side] for name, of_side in kills.items()
    }
    rows: dict[str, dict[str, str]] = {
        "tokens/s without kills": {
            name: f"{side['calm_tokens_per_second']:.0f}" for name, side in figures.items()
        },
        "tokens/s with kills": {
            name: f"{side['tokens_per_second']:.0f}" for name, side in figures.items()
        },
        "time lost a kill": {
            name: f"{side['seconds_lost_a_kill']:.1f} s" for name, side in figures.items()
        },
        "pause of all, median, maximum": {
            name: f"{statistics.median(each):.1f}, {max(each):.1f} s"
            for name, each in pauses.items()
        },
        "all train again after, median, maximum": {
            name: f"{statistics.median(each):.0f}, {max(each):.0f} s" if each else "never"
            for name, each in backs.items()
        },
        "sites back": {name: f"{len(each)} of {len(kills[name])}" for name, each in backs.items()},
        "loss at equal tokens": {
            name: f"{side['loss_at_equal_tokens']:.4f}" for name, side in figures.items()
        },
    }
    for label, cells in rows.items():
        table.add_row(label, *(cells[name] for name in figures))
    return table


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=7, help="of what is drawn")
    parser.add_argument("--megabits", type=float, default=MEGABITS, help="rate of a site, a second")
    parser.add_argument("--torchft-python", default=sys.executable, help="has torch and torchft")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="JSON to write")
    parser.add_argument("--folder", type=Path, help="keeps logs; default: none")
    options = parser.parse_args()
    if options.kills < 1:
        parser.error("--kills must be at least 1")
    if os.geteuid() != 0:
        parser.error("namespaces and cgroups need root")
    if not imports(options.torchft_python, "torchft"):
        parser.error(f"{options.torchft_python} has no torchft: pip install torchft==0.2.0")
    return options


def versions(python: str) -> dict[str, str]:
    """Return the versions of both sides."""
    names = "import importlib.metadata as m; print(m.version('torch'), m.version('torchft'))"
    torch, torchft = subprocess.check_output([python, "-c", names], text=True).split()
    own = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    machine = {"python": platform.python_version(), "kernel": platform.release()}
    return machine | own | {"torch": torch, "torchft": torchft}


def main() -> int:
    """Kill the sites of both sides, print the table, write the record."""
    end_by_exceptions()
    options = parsed()
    say = Console(width=120, highlight=False, markup=False).print
    kills = drawn_kills(options.kills, options.seed)
    figures: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="geojax-kills-")))
        folder.mkdir(parents=True, exist_ok=True)
        config, batches = small_config(folder), folder / "batches.npy"
        write_batches(config, batches)
        for name in ("torchft", "geojax"):
            with sites(f"kills{os.getpid()}", options.megabits) as (network, groups):
                say(f"{name}: {', '.join(kills)}")
                side: Side
                if name == "geojax":
                    side = GeojaxRun(folder, config, SAVE_INTERVAL, network, groups)
                else:
                    side = TorchftRun(folder, options.torchft_python, batches, network, groups)
                try:
                    side.start()
                    figures[name] = watched(side, kills, say)
                finally:
                    side.end()
    runs: dict[str, Progress] = {name: side.pop("progress") for name, side in figures.items()}
    tokens = min(run.tokens for run in runs.values())
    for name, run in runs.items():
        figures[name]["loss_at_equal_tokens"] = run.loss_after(tokens)
    say(shown(figures))
    about = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": {"device": "CPU", "cores": len(os.sched_getaffinity(0))},
        "versions": versions(options.torchft_python),
        "megabits": options.megabits,
        "tokens_compared": tokens,
    }
    options.output.write_text(json.dumps(about | {"sides": figures}, indent=1) + "\n")
    say(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
