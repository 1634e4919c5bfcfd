"""Two sites on one GPU: processes of their own with half of its memory each, in role data.

    python benchmarks/gpu/islands.py

A model of 1.2B parameters; each site trains its own half of the sequences, and gradients go through
the transport, bucket by bucket. The table has the pace of both, what a step exchanges, and
how much of the time that buckets travel the receiver's devices compute; `--trace` writes one step
of both sites and the link for ui.perfetto.dev. Both sites share one GPU's compute: the figure is
the overlap, and no speed of two GPUs. Without a GPU it is a toy model on the CPU.

Needs what benchmarks/gpu/train.py needs.
"""

import argparse
import json
import os
import secrets
import shlex
import socket
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from train import RESULTS, ask

SITES = ("east", "west")
OUTPUT = RESULTS.with_name("gpu_islands.json")
MEMORY_SHARE = "0.45"
"""Of a GPU's memory for each of the two."""

Actions = Sequence[Mapping[str, Any]]


class Transfer(NamedTuple):
    """A bucket on its way, on the clock that both processes of a machine have."""

    bucket: str
    sender: int
    start: float
    end: float


def transfers(sites: Sequence[Actions]) -> Iterator[Transfer]:
    """Yield the buckets of a step, each from its offer to its arrival at the other site.

    A site asks for them when it begins the step.
    """
    for sender, actions in enumerate(sites):
        asked = sites[1 - sender][0]["start"]
        arrived = {
            each["bucket"]: each["arrived"] for each in sites[1 - sender] if "arrived" in each
        }
        for each in actions:
            if "sent" in each:
                start = max(each["sent"], asked)
                end = max(start, arrived[each["bucket"]])
                yield Transfer(each["bucket"], sender, start, end)


def share_under_compute(moving: Iterable[Transfer], sites: Sequence[Actions]) -> float:
    """Return the share of the transfers' time in which the receiver's devices compute."""
    hidden = total = 0.0
    for each in moving:
        total += each.end - each.start
        for action in sites[1 - each.sender]:
            hidden += max(0.0, min(each.end, action["end"]) - max(each.start, action["start"]))
    return hidden / total if total else 0.0


def trace(moving: Iterable[Transfer], sites: Sequence[Actions]) -> dict[str, Any]:
    """Return a step of both sites and of the link between them in Chrome's format."""
    origin = min(action["start"] for actions in sites for action in actions)
    slices = [
        (f"site {name}", action["name"], action["start"], action["end"])
        for name, actions in zip(SITES, sites, strict=True)
        for action in actions
    ]
    slices += [
        (f"{SITES[each.sender]} to {SITES[1 - each.sender]}", each.bucket, each.start, each.end)
        for each in moving
    ]
    tracks = sorted({track for track, *_ in slices})
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": track}}
        for number, track in enumerate(tracks)
    ]
    for track, name, start, end in slices:
        place = {"pid": 0, "tid": tracks.index(track)}
        times = {"ts": 1e6 * (start - origin), "dur": 1e6 * (end - start)}
        events.append({"ph": "X", "name": name} | place | times)
    return {"traceEvents": events}


def measure(work: dict[str, Any]) -> list[dict[str, Any]]:
    """What came of `work` at both sites, which train side by side."""
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = MEMORY_SHARE
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        together = {
            "coordinator": f"127.0.0.1:{free.getsockname()[1]}",
            "key": secrets.token_hex(16),
        }

    def of_site(site: int) -> dict[str, Any]:
        return ask("islands_side.py", do="measure", site=site, **together, **work)

    with ThreadPoolExecutor(len(SITES)) as threads:
        return list(threads.map(of_site, range(len(SITES))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--toy", action="store_true", help="the toy model, on a GPU too")
    parser.add_argument("--steps", type=int, help="of each site; default: 40, of a toy 10")
    parser.add_argument("--microbatches", type=int, default=4, help="of a step; default: 4")
    parser.add_argument("--trace", type=Path, help="JSON of a step, for ui.perfetto.dev")
    parser.add_argument("--output", type=Path, help=f"JSON; default on a GPU: {OUTPUT.name}")
    arguments = parser.parse_args()

    machine = ask("geojax_side.py", do="describe", toy=arguments.toy, layers=None)
    if "problem" in machine:
        raise SystemExit(f"error: geojax does not run here: {machine['problem']}")
    works = machine.pop("works")
    del machine["sides"]
    toy = "toy" in works
    steps = arguments.steps or (10 if toy else 40)
    count = arguments.microbatches
    work = works["toy" if toy else "1.2B"] | {"steps": steps, "block": max(1, steps // 5)}
    work |= {"precision": "bf16", "rows": 2 * count if toy else count}
    work |= {"microbatches": count, "held": count if toy else 1}
    sites = measure(work)
    for name, made in zip(SITES, sites, strict=True):
        if "problem" in made:
            raise SystemExit(f"error: site {name}: {made['problem']}")
    assert sites[0]["losses"] == sites[1]["losses"], "both sites have the loss of all sequences"
    steps_of_sites = [made["actions"] for made in sites]
    moving = list(transfers(steps_of_sites))
    share = share_under_compute(moving, steps_of_sites)
    print(f"{machine['device']} ({machine['platform']}), two sites with {MEMORY_SHARE} of it each")
    for name, made in zip(SITES, sites, strict=True):
        seconds = statistics.median(made["seconds"])
        print(
            f"site {name}: {work['rows'] * work['sequence'] / seconds:,.0f} tokens/s, "
            f"{1e3 * seconds:.0f} ms a step, {made['sent_bytes'] / 1e6:.1f} MB sent in each, "
            f"{1e3 * statistics.median(made['wait_seconds']):.1f} ms of it exposed wait, peak "
            f"{made['peak_bytes'] / 1e9:.1f} GB"
        )
    print(
        f"of the time in which {len(moving)} messages of a step travel, the receiver computes "
        f"{share:.0%}"
    )
    if arguments.trace:
        arguments.trace.write_text(json.dumps(trace(moving, steps_of_sites)))
        print(f"wrote {arguments.trace}")
    if output := arguments.output or (None if toy else OUTPUT):
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": machine,
            "work": work,
            "sites": dict(zip(SITES, sites, strict=True)),
            "share_under_compute": share,
        }
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
