import pytest

from geojax.errors import UserError
from geojax.quantities import (
    Bytes,
    BytesPerSecond,
    FlopsPerSecond,
    Seconds,
    Share,
    duration,
    quantity,
)
from geojax.settings import Settings, validate


class Everything(Settings):
    time: Seconds = 0.0
    size: Bytes = 1
    rate: BytesPerSecond = 1.0
    compute: FlopsPerSecond = 1.0
    share: Share = 0.0


@pytest.mark.parametrize(
    ("field", "written", "value"),
    [
        ("time", "21ms", 0.021),
        ("time", "4 us", 4e-6),
        ("time", "0.1us", 1e-7),
        ("time", "1.5e-3s", 0.0015),
        ("time", "300", 300.0),
        ("time", 0.5, 0.5),
        ("size", "80GB", 80 * 10**9),
        ("size", "4MiB", 4 * 2**20),
        ("size", "512B", 512),
        ("size", 4096, 4096),
        ("rate", "100Gbit/s", 12.5e9),
        ("rate", "450GB/s", 450e9),
        ("rate", "1gbit", 125e6),
        ("rate", "200mbit", 25e6),
        ("rate", "8kbit", 1e3),
        ("compute", "989TFLOP/s", 989e12),
        ("compute", "1.979PFLOP/s", 1979e12),
        ("share", "0.1%", 0.001),
        ("share", "0.25", 0.25),
    ],
)
def test_a_number_or_a_number_with_its_unit(field, written, value):
    read = validate(Everything, {field: written}, "test")
    assert getattr(read, field) == value


@pytest.mark.parametrize(
    ("field", "written", "part"),
    [
        ("time", "21 minutes", "21ms"),
        ("time", "-1ms", "not a number of seconds"),
        ("time", "1.2.3s", "'1.2.3'"),
        ("time", "1e99999999s", "21ms"),
        ("size", "1e99B", "less than or equal to"),
        ("size", "80Gb", "80GB"),
        ("size", "1.5B", "integer"),
        ("size", 0, "greater than 0"),
        ("rate", "100Gbit", "100Gbit/s"),
        ("rate", "100Gbps", "100Gbit/s"),
        ("compute", "1TFLOPS", "989TFLOP/s"),
        ("share", "100%", "less than 1"),
    ],
)
def test_what_is_no_quantity_is_refused_with_an_example(field, written, part):
    with pytest.raises(UserError, match=f"^test: {field}: .*{part}"):
        validate(Everything, {field: written}, "test")


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        *((830, "tokens/s", "830 tokens/s"), (999.4, "tokens/s", "999 tokens/s")),
        *((999.6, "tokens/s", "1 ktokens/s"), (1.2e9, "B", "1.2 GB"), (999_600, "", "1M")),
        *((3.41e11, "", "341B"), (-999.6, "B", "-1 kB"), (0, "B", "0 B")),
    ],
)
def test_counts_have_three_digits_and_a_prefix(value, unit, words):
    assert quantity(value, unit) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        *((0, "0 s"), (0.0213, "21.3 ms"), (0.9996, "1 s"), (3.25, "3.25 s")),
        (99.7, "1 min 40 s"),
        *((120, "2 min"), (3599.7, "1 h"), (7500, "2 h 5 min"), (360_000, "4 d 4 h")),
        (1e30, "1e+30 s"),
    ],
)
def test_durations(seconds, words):
    assert duration(seconds) == words
