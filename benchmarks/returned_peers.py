"""A peer that is killed in mid-transfer and returns, 200 times, in one process of the transport.

    python benchmarks/returned_peers.py

Three sites on this machine: one process holds two of them and lives on, and exchanges small
messages between these all the time. The process of the third exchanges 8 MiB both ways with the
first, gets SIGKILL while messages are on their way, and is replaced by a new one. All values are
compared.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "NPROC": "8"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import jax
from support.returning_peers import kill_and_return

OUTPUT = Path(__file__).resolve().parent / "results" / "returned_peers.json"
SAMPLE = 40
"""Kills at the begin and at the end whose medians are compared, after the first 20."""
WARM_UP = 20


def main() -> None:
    """Kill, print the figures, write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--mebibytes", type=int, default=8, help="size of a message")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    kills = kill_and_return(options.kills, options.mebibytes << 20)
    early = kills.resources[WARM_UP : WARM_UP + SAMPLE]
    late = kills.resources[-SAMPLE:]
    figures = {
        "kills": options.kills,
        "kills_within_a_message": kills.within_a_message,
        "messages_beside": kills.undisturbed_messages,
        "median_detection_seconds": statistics.median(kills.detection_seconds),
        "longest_detection_seconds": max(kills.detection_seconds),
        **{
            f"{kind}_{when}": statistics.median(getattr(each, kind) for each in part)
            for kind in ("resident_bytes", "open_files", "threads")
            for when, part in (("early", early), ("late", late))
        },
    }
    print(json.dumps(figures, indent=1))
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "figures": figures,
    }
    options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
