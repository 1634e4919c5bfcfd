import random

from geojax.probe.outliers import FLOOR, slow_ones


def test_what_lies_far_below_the_others_is_slow():
    rates = {f"device {number}": 100.0 + number % 3 for number in range(16)}
    assert slow_ones(rates) == []
    assert slow_ones(rates | {"device 5": 70.0}) == ["device 5"]
    assert slow_ones(rates | {"device 5": 300.0}) == []  # faster is no illness
    just_above = 101.0 * (1 - FLOOR) + 0.5
    assert slow_ones(rates | {"device 5": just_above}) == []


def test_few_and_halves_can_be_judged():
    assert slow_ones({}) == slow_ones({"alone": 1.0}) == []
    assert slow_ones({"east": 100.0, "west": 50.0}) == ["west"]
    assert slow_ones({"a": 100.0, "b": 100.0, "c": 50.0, "d": 50.0}) == ["c", "d"]
    assert slow_ones({"a": 100.0, "b": 50.0, "c": 50.0}) == []  # most are so


def test_where_all_differ_much_nothing_stands_out():
    generator = random.Random(0)
    spread = {number: generator.gauss(100, 15) for number in range(64)}
    assert min(spread.values()) < (1 - FLOOR) * 100
    assert slow_ones(spread) == []
    assert slow_ones(spread | {99: 10.0}) == [99]
