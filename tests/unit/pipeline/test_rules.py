"""Every invariant is found broken, by its name and place."""

import dataclasses

import pytest

from geojax.errors import UserError
from geojax.pipeline import (
    Action,
    Invariant,
    Kind,
    Placement,
    ScheduleError,
    one_forward_one_backward,
    tick_table,
    validate,
    validate_table,
    zero_bubble_h1,
)

ONE_F_ONE_B = one_forward_one_backward(3, 5)


def changed(schedule, stage, change):
    """The schedule with one stage's order changed in place by `change`."""
    orders = [list(order) for order in schedule.orders]
    change(orders[stage])
    return dataclasses.replace(schedule, orders=tuple(map(tuple, orders)))


def swap(first, second):
    def change(order):
        order[first], order[second] = order[second], order[first]

    return change


@pytest.mark.parametrize(
    ("schedule", "invariant", "message"),
    [
        (
            changed(ONE_F_ONE_B, 1, lambda order: order.pop()),
            Invariant.COMPLETE,
            r"B4\.1 does not run exactly once; rule COMPLETE",
        ),
        (
            changed(ONE_F_ONE_B, 2, lambda order: order.append(order[0])),
            Invariant.COMPLETE,
            r"F0\.2 does not run exactly once",
        ),
        (
            changed(
                ONE_F_ONE_B,
                0,
                lambda order: order.append(Action(Kind.WEIGHT, 0, 0)),
            ),
            Invariant.COMPLETE,
            r"W0\.0 is not among",
        ),
        (
            changed(
                ONE_F_ONE_B,
                0,
                lambda order: order.append(Action(Kind.FORWARD, 0, 2)),
            ),
            Invariant.PLACED,
            r"stage 0 runs F0\.2; rule PLACED",
        ),
        (
            changed(ONE_F_ONE_B, 2, swap(0, 1)),
            Invariant.CAN_FINISH,
            r"stage 2 waits at B0\.2 for F0\.2; rule CAN_FINISH",
        ),
        (
            # The last stage wants the third microbatch first, the first stage a backward by then.
            changed(one_forward_one_backward(2, 4), 1, swap(0, 4)),
            Invariant.CAN_FINISH,
            "waits at",
        ),
        (
            changed(zero_bubble_h1(1, 2), 0, swap(1, 2)),
            Invariant.CAN_FINISH,
            r"stage 0 waits at W0\.0 for B0\.0",
        ),
    ],
)
def test_broken_schedules(schedule, invariant, message):
    with pytest.raises(ScheduleError, match=message) as raised:
        validate(schedule)
    assert raised.value.invariant is invariant
    assert isinstance(raised.value, UserError)


def test_the_limit_counts_what_a_stage_holds():
    validate(one_forward_one_backward(4, 8), limit=4)
    with pytest.raises(ScheduleError, match="stage 0 holds 4 where the limit is 3") as raised:
        validate(one_forward_one_backward(4, 8), limit=3)
    assert raised.value.invariant is Invariant.WITHIN_LIMIT


def moved(table, stage, place, tick):
    starts = [list(ticks) for ticks in table.starts]
    starts[stage][place] = tick
    return dataclasses.replace(table, starts=tuple(map(tuple, starts)))


def test_broken_tables():
    table = tick_table("branch_free", Placement.linear(3), 6, (1, 2))
    validate_table(table, limit=7)
    # Stage 1 receives what stage 0 made in tick 0 one tick later, in tick 1.
    assert table.starts[1][0] == 1
    with pytest.raises(ScheduleError, match=r"F0\.1 in tick 0 needs F0\.0 of tick 0") as raised:
        validate_table(moved(table, 1, 0, 0))
    assert raised.value.invariant is Invariant.ARRIVED
    # The second forward in the tick of the first.
    with pytest.raises(ScheduleError, match=r"stage 0 begins F1\.0 in tick 0") as raised:
        validate_table(moved(table, 0, 1, 0))
    assert raised.value.invariant is Invariant.IN_STEP
    # A tick that falls.
    with pytest.raises(ScheduleError) as raised:
        validate_table(moved(table, 0, len(table.starts[0]) - 1, 0))
    assert raised.value.invariant is Invariant.IN_STEP
