"""Run the fuzz: `python -m fuzz --cases 2000`."""

import argparse
import collections
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def main() -> int:
    """Run the cases, print the problems and a summary, and return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m fuzz")
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, help="run this case and print what it prints")
    parser.add_argument("--parallel", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--surface", help="draw from this one alone; it changes what --only draws")
    options = parser.parse_args()
    # Imported here, so that --help need not wait for JAX.
    from fuzz.cases import SURFACES, Cases
    from fuzz.corpus import Corpus
    from fuzz.server import Outcome, Server

    surfaces = [module.__name__.rpartition(".")[2] for module in SURFACES]
    if options.surface not in (None, *surfaces):
        parser.error(f"--surface is one of {', '.join(surfaces)}")

    with tempfile.TemporaryDirectory(prefix="geojax-fuzz-") as folder:
        started = time.monotonic()
        cases = Cases(Corpus.make(Path(folder)), options.surface)
        number_of: dict[int, int] = {}

        def show(outcome: Outcome) -> None:
            if (problem := outcome.problem) or options.only is not None:
                number = number_of[id(outcome.case)]
                said = f"{outcome.stdout[-500:]}{outcome.stderr[-3000:]}"
                print(f"case {number} {problem}: {outcome.case}\n{said}", flush=True)

        server = Server(Path(folder) / "cases", options.parallel, show)
        numbers = range(options.seed, options.seed + options.cases)
        if options.only is not None:
            numbers = range(options.only, options.only + 1)
        for number in numbers:
            case = cases.draw(number)
            number_of[id(case)] = number
            server.submit(number, case)
        outcomes = server.finish()
        found = collections.Counter(_kind(outcome) for outcome in outcomes)
        longest = max(outcome.cpu_seconds for outcome in outcomes)
        largest = max(outcome.peak_bytes for outcome in outcomes)
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(found.items()))
        print(
            f"{len(outcomes)} cases in {time.monotonic() - started:.0f} s: {counts}; at most "
            f"{longest:.1f} s of computing and {largest / 2**30:.2f} GiB"
        )
        return 1 if found["problem"] else 0


def _kind(outcome: Any) -> str:
    if outcome.problem:
        return "problem"
    return "accepted" if outcome.code in (None, 0) else "refused"


if __name__ == "__main__":
    sys.exit(main())
