import pytest

from geojax.errors import UserError
from geojax.settings import validate
from geojax.wan import WanSettings
from geojax.wan.emulate import netem_arguments
from geojax.wan.relay import buffer_bytes


def settings(**content):
    return validate(WanSettings, content, "test")


LONG = {"round_trip_seconds": "21ms", "bytes_per_second": "200mbit"}


def test_without_anything_a_link_is_unshaped():
    assert not settings().shaped
    for given in ({"round_trip_seconds": "1ms"}, {"bytes_per_second": "1gbit"}, {"loss": "1%"}):
        assert settings(**given).shaped


def test_the_queue_holds_the_bandwidth_delay_product_and_some():
    product = 0.021 * 200e6 / 8
    assert settings(**LONG).bandwidth_delay_product == product
    assert settings(**LONG).queue_limit == product + 2**20
    assert settings(**LONG, queue_bytes="256KiB").queue_limit == 256 * 1024
    # What waits and what is on its way, each direction.
    assert buffer_bytes(settings(**LONG)) > product / 2 + product + 2**20


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ({"sites": 1}, "sites: input should be greater than or equal to 2"),
        ({"round_trip_seconds": 21}, "21ms is so many milliseconds"),
        (LONG | {"jitter_seconds": "11ms"}, "more than the delay that it varies, 0.0105 s"),
        ({"queue_bytes": "1MiB"}, "only in front of a link with a rate"),
        (LONG | {"queue_bytes": "64KiB"}, "128KiB would"),
        ({"loss": 1.0}, "loss: input should be less than 1"),
        ({"loss": 0.9999999999}, "loss: input should be less than or equal to 0.5"),
        ({"bytes_per_second": "8bit/s"}, "bytes_per_second: input should be greater than or equal"),
    ],
)
def test_what_no_link_is_like_is_refused(content, part):
    with pytest.raises(UserError, match=f"^test: .*{part}"):
        settings(**content)


def test_netem_is_told_the_same():
    everything = LONG | {"loss": "0.1%", "jitter_seconds": "1ms"}
    assert " ".join(netem_arguments(settings(**everything))) == (
        "netem delay 10500us 1000us loss 0.100000% rate 200000000bit limit "
        f"{-(-(262500 + 525000 + 2**20) // 1500)}"
    )
    slow = settings(round_trip_seconds="1ms")
    assert "rate" not in netem_arguments(slow)
    uneven = slow.model_copy(update={"jitter_seconds": 1e-4})
    assert "rate 100gbit" in " ".join(netem_arguments(uneven))  # which keeps the order
