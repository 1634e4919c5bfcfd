"""Run the fuzz: `python -m fuzz --cases 2000`."""

import argparse
import collections
import os
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def main() -> int:
    """Run the cases, print the problems and a summary, and return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m fuzz")
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, help="run this case and print what it prints")
    parser.add_argument("--parallel", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    # Imported here, so that --help need not wait for JAX.
    from fuzz.cases import Cases
    from fuzz.server import Server

    with tempfile.TemporaryDirectory(prefix="geojax-fuzz-") as folder:
        started = time.monotonic()
        cases = Cases(_corpus(Path(folder)))
        server = Server(Path(folder) / "cases", options.parallel)
        numbers = range(options.seed, options.seed + options.cases)
        if options.only is not None:
            numbers = range(options.only, options.only + 1)
        number_of = {}
        for number in numbers:
            case = cases.draw(number)
            number_of[id(case)] = number
            server.submit(number, case)
        outcomes = server.finish()
        found: collections.Counter[str] = collections.Counter()
        for outcome in outcomes:
            problem = outcome.problem
            kind = "accepted" if outcome.code in (None, 0) else "refused"
            found["problem" if problem else kind] += 1
            if problem or options.only is not None:
                number = number_of[id(outcome.case)]
                print(f"case {number} {problem}: {outcome.case}\n{outcome.stderr[-3000:]}")
        longest = max(outcome.cpu_seconds for outcome in outcomes)
        largest = max(outcome.peak_bytes for outcome in outcomes)
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(found.items()))
        print(
            f"{len(outcomes)} cases in {time.monotonic() - started:.0f} s: {counts}; at most "
            f"{longest:.1f} s of computing and {largest / 2**30:.2f} GiB"
        )
        return 1 if found["problem"] else 0


def _corpus(folder: Path) -> Path:
    """Prepare a small corpus in a child: the tokenizer starts threads, which no fork copies."""
    child = os.fork()
    if child == 0:
        from support.small_runs import prepare_corpus

        prepare_corpus(folder)
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, "the corpus could not be prepared"
    return folder / "sums"


if __name__ == "__main__":
    sys.exit(main())
