"""One cell of the table: one contestant over one link."""

import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from geojax.wan import congestion_control
from wan_sides.bound import Departure, efficiency_bound, pipeline_bound
from wan_sides.contestants import Contestant
from wan_sides.link import Link
from wan_sides.team import team
from wan_sides.work import TOKENS_PER_BATCH

CHECKED_STEPS = 3
WARM_UP_SECONDS = 30.0
"""Time of further steps before any counts: while the allocator takes what it keeps, some steps last
half as long again, for new pages."""
START_SECONDS, STEPS_SECONDS = 300.0, 240.0


def measure(
    contestant: Contestant,
    link: Link,
    cores: list[int],
    weights: Path,
    rounds: int,
    steps: int,
    torch_python: str,
) -> dict[str, Any]:
    """Start the contestant's processes and let them train, over the plain and long link in turn.

    The first steps, from the given weights, are for their losses; more go by before any counts.
    After each change of the link a step goes by before the clock starts, for TCP to find its rate.

    Islands as stages then simulate their order of work.

    Returns:
        JSON: losses, seconds and a process's processor seconds of the median step of each round
        over both links, bytes per step, what the link's relay takes of the cores, the load of the
        machine before; where the contestant says it, the bound of the efficiency and for how long
        the devices of each site waited in the last step of a round, by cause.

    Raises:
        ContestantFailed: a process ended or is stuck; in one line.
    """
    began = time.monotonic()
    load = os.getloadavg()[0]
    link.shape(False)
    with team(contestant, link, cores, weights, torch_python) as workers:
        started = workers.ask("start", START_SECONDS)
        first = workers.ask("steps", STEPS_SECONDS, count=CHECKED_STEPS)[0]
        more = round(WARM_UP_SECONDS * CHECKED_STEPS / first["seconds"])
        workers.ask("steps", STEPS_SECONDS, count=max(1, more))
        seconds: dict[str, list[float]] = {"plain": [], "link": []}
        processor: dict[str, list[float]] = {"plain": [], "link": []}
        waits: dict[str, list[Any]] = {"plain": [], "link": []}
        sent, relayed = [0, 0], 0.0
        for _ in range(rounds):
            for path, times in seconds.items():
                link.shape(path == "link")
                workers.ask("steps", STEPS_SECONDS, count=1)
                before, relay_before = link.sent_bytes(), link.relay_seconds()
                taken = [workers.ask("steps", STEPS_SECONDS, count=1) for _ in range(steps)]
                times.append(_median_step(taken, "seconds", max))
                processor[path].append(_median_step(taken, "processor_seconds", statistics.mean))
                waits[path].append([answer.get("waits") for answer in taken[-1]])
                if path == "link":
                    after = link.sent_bytes()
                    sent = [s + b - a for s, a, b in zip(sent, before, after, strict=True)]
                    relayed += link.relay_seconds() - relay_before
        simulated = {}
        if "hop_bytes" in started[0]:
            plain = min(seconds["plain"])
            predicted, _ = workers.ask("simulated_seconds", START_SECONDS, plain_seconds=plain)
            tokens = contestant.repeats * TOKENS_PER_BATCH
            simulated = {"tokens_per_second_simulated": tokens / predicted}
    formula = contestant.formula_bytes or started[0]["formula_bytes"]
    counted = sum(sent) / (rounds * steps)
    return summary(seconds, contestant.repeats * TOKENS_PER_BATCH) | {
        **_bound(started[0], min(seconds["plain"]), link),
        **simulated,
        **({"wait_seconds_of_sites": waits} if waits["link"][0][0] else {}),
        "losses": first["losses"],
        "seconds_per_step": seconds,
        "processor_seconds_per_step": processor,
        "relay_processor_seconds_per_step": relayed / (rounds * steps),
        "sent_bytes_per_step": [each / (rounds * steps) for each in sent],
        "formula_bytes_per_step": formula,
        "counted_over_formula": counted / formula,
        "versions": started[0]["versions"],
        "congestion_control": congestion_control(link.wan.sites[0]),
        "load_before": load,
        "took_seconds": time.monotonic() - began,
    }


def _median_step(
    steps: list[list[dict[str, Any]]], figure: str, of_processes: Callable[[Iterable[float]], float]
) -> float:
    """The median of a figure of steps, each of all processes' answers."""
    return statistics.median(
        of_processes([answer[figure] for answer in answers]) for answers in steps
    )


def _bound(started: dict[str, Any], plain_seconds: float, link: Link) -> dict[str, float]:
    """The bound of the efficiency; nothing of a contestant that does not say what it sends when."""
    if "hop_bytes" in started:
        return {"bound": pipeline_bound(plain_seconds, started["hop_bytes"], link.wan.settings)}
    if "departures" not in started:
        return {}
    departures = [Departure(*each) for each in started["departures"]]
    return {"bound": efficiency_bound(started["step_seconds"], departures, link.wan.settings)}


def summary(seconds: dict[str, list[float]], tokens: int) -> dict[str, float]:
    """What the seconds a step of `tokens`, of each round over both links, come to.

    Whatever else runs on the machine can only slow a step down, so the fastest rounds say most; the
    median of each round's own quotient is given beside them.
    """
    quotients = [a / b for a, b in zip(seconds["plain"], seconds["link"], strict=True)]
    plain, link = min(seconds["plain"]), min(seconds["link"])
    return {
        "tokens_per_second": tokens / link,
        "tokens_per_second_unshaped": tokens / plain,
        "efficiency": plain / link,
        "median_efficiency_of_rounds": statistics.median(quotients),
    }
