"""Published measurements of pipelines, and what they are compared with."""

import csv
from pathlib import Path

from geojax.pipeline import Costs, Hop, Placement, simulate

DATA = Path(__file__).parents[1] / "data"
CROSSPIPE_STAGES = 8
CROSSPIPE_FORWARD = 0.038
CROSSPIPE_MICROBATCHES = {1: 16, 2: 32, 3: 32}
CROSSPIPE_LIMITS = {1: 8, 2: 8, 3: 16}
"""Microbatches in flight: one or two times the activation memory of 1F1B."""


def _rows(name):
    """The rows of a table; lines that begin with # say where it comes from."""
    with (DATA / name).open() as lines:
        table = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    return [{key: _number(value) for key, value in row.items()} for row in table]


def _number(text):
    if text == "":
        return None
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() and "." not in text else number


def zero_bubble_rows():
    """Zero Bubble, Tables 5 and 9: profiled times in milliseconds, and bubble rates."""
    return _rows("zero_bubble_table5_9.csv")


def zero_bubble_costs(row, placement):
    """Stages of one row; the same hop between all of them."""
    hop = Hop(latency=row["comm_ms"])
    return Costs.of_stages(
        placement, row["f_ms"], row["b_ms"], row["w_ms"], lambda source, target: hop
    )


def zero_bubble_rate(timeline, row):
    """The paper's bubble rate: of the longest stage's time, from its first to its last action."""
    cost = max(timeline.stage_seconds)
    return 1 - row["m"] * (row["f_ms"] + row["b_ms"] + row["w_ms"]) / cost


def crosspipe_rows():
    """CrossPipe, Table 5: seconds per microbatch on 8 stages in two data centers."""
    return _rows("crosspipe_table5.csv")


def crosspipe_seconds(schedule, costs):
    """Seconds per microbatch of CrossPipe's baselines, whose receives block."""
    return simulate(schedule, costs, late_receives=True).seconds / schedule.microbatches


def crosspipe_backward(rows):
    """The whole backward of a stage, from one cell: 1F1B without latency, case 1."""
    microbatches = CROSSPIPE_MICROBATCHES[1]
    (cell,) = (
        row["s_1f1b"]
        for row in rows
        if (row["latency_over_tf"], row["transfer_over_tf"], row["case"]) == (0, 0, 1)
    )
    both = cell * microbatches / (microbatches + CROSSPIPE_STAGES - 1)
    return both - CROSSPIPE_FORWARD


def crosspipe_costs(row, backward):
    """One row's pipeline: the cut in the middle; case 2 repeats the forward before the backward.

    Half of a backward is taken to be the gradient of weights.
    """
    forward, again = CROSSPIPE_FORWARD, CROSSPIPE_FORWARD if row["case"] == 2 else 0.0
    hops = [Hop()] * (CROSSPIPE_STAGES - 1)
    hops[CROSSPIPE_STAGES // 2 - 1] = Hop(
        row["latency_over_tf"] * forward, row["transfer_over_tf"] * forward, "cut"
    )
    chunks = Placement.linear(CROSSPIPE_STAGES).chunks
    return Costs(
        (forward,) * chunks,
        (backward / 2 + again,) * chunks,
        (backward / 2,) * chunks,
        tuple(hops),
    )
