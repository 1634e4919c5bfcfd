"""What a newcomer gets from `./launch/quickstart`: how long it takes and what the model learned.

Clones this repository into an empty folder, runs the script there with nothing installed, and
checks the run against what the README promises. Prints a table and writes JSON:

    taskset -c 0,1 python benchmarks/quickstart.py --output benchmarks/results/quickstart.json
"""

import argparse
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tokenize
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument(
        "--output", type=Path, help="JSON to write, and the loss curve as a PNG beside it"
    )
    output = options.parse_args().output
    with tempfile.TemporaryDirectory(prefix="geojax-quickstart-") as folder:
        clone = Path(folder) / "geojax"
        started = time.monotonic()
        subprocess.run(["git", "clone", "--quiet", REPOSITORY, clone], check=True)
        # An empty cache too: the corpus is prepared and every program is compiled.
        environment = os.environ | {"XDG_CACHE_HOME": str(Path(folder) / "cache")}
        process = subprocess.run(
            ["./launch/quickstart"],
            cwd=clone,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        total = time.monotonic() - started
        print(process.stdout)
        if process.returncode:
            return process.returncode
        run = clone / "runs" / "quickstart"
        results = measure(run, process.stdout, total)
        if output is not None:
            shutil.copy(run / "loss.png", output.with_suffix(".png"))
    for name, value, wanted, reached in results["checks"]:
        print(f"{name:42} {value:>12}   wanted {wanted:16} {'yes' if reached else 'NO'}")
    if output is not None:
        output.write_text(json.dumps(results, indent=2) + "\n")
    return 0 if all(check[-1] for check in results["checks"]) else 1


def measure(run: Path, printed: str, total: float) -> dict:
    """The figures of a finished run and whether each is what was promised."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    validation = [line["validation/python"] for line in lines if "validation/python" in line]
    trained = float(re.search(r"trained\s+(\d+) s", printed)[1])
    parameters = float(re.search(r"([\d.]+)M parameters", printed)[1])
    written = [line for line in (run / "sample.txt").read_text().splitlines() if line.strip()]
    good = sum(map(is_tokenizable, written))
    fall = 1 - validation[-1] / validation[0]
    checks = [
        ("minutes from clone to result", f"{total / 60:.1f}", "under 3", total < 180),
        ("parameters, in millions", f"{parameters:.2f}", "2 and more", parameters >= 2),
        ("fall of the validation loss", f"{fall:.1%}", "a third and more", fall >= 1 / 3),
        (
            "lines written that Python can tokenize",
            f"{good} of {len(written)}",
            "half and more",
            2 * good >= len(written),
        ),
    ]
    return {
        "command": " ".join(["python", *sys.argv]),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "total_seconds": total,
        "training_seconds": trained,
        "validation_losses": validation,
        "lines_written": len(written),
        "lines_tokenized": good,
        "checks": checks,
    }


def is_tokenizable(line: str) -> bool:
    """Whether Python's tokenizer accepts `line` by itself, without its indentation."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline))
    except (tokenize.TokenError, SyntaxError):
        return False
    return all(token.type != tokenize.ERRORTOKEN for token in tokens)


if __name__ == "__main__":
    sys.exit(main())
