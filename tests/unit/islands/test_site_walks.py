"""The stages of a site, side by side: what ends one of them ends all."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from geojax.errors import RunError
from geojax.islands.site_walks import SiteWalks
from geojax.islands.stage_transport import between_sites, stage_transports
from geojax.islands.traffic import LinkTraffic
from geojax.transport import MeasuredLink, MessageKey, loopback

KEY = MessageKey(3, "activation")
LIKE = [jax.ShapeDtypeStruct((2,), jnp.float32)]


def number_on_device(number):
    """Put a number on the first device without a program."""
    return jax.device_put(np.float32(number))


def sites_of_stages(sites, stages):
    return [stage_transports(transport, stages) for transport in loopback(sites)]


def site_walks(transports):
    return SiteWalks(
        [types.SimpleNamespace(transport=each) for each in transports], len(transports)
    )


def test_messages_of_one_key_between_several_stages_stay_apart():
    (_, second), (third, fourth) = sites_of_stages(2, 2)
    assert [second.site, third.site, third.sites] == [1, 2, 4]
    like = [jax.ShapeDtypeStruct((), jnp.float32, sharding=number_on_device(0).sharding)]
    fetches = [each.fetch(1, KEY, like) for each in (third, fourth)]
    for number, receiver in enumerate((2, 3)):
        second.offer(receiver, KEY, [number_on_device(number)])
    assert [float(fetch.result()[0]) for fetch in fetches] == [0.0, 1.0]
    inside = fourth.fetch(2, KEY, like)
    third.offer(3, KEY, [number_on_device(7)])
    assert float(inside.result()[0]) == 7.0


def test_stages_of_several_processes_reach_each_other_and_their_counterparts():
    sites, stages, processes = 2, 4, 2  # in each site, two stages a process
    ends = loopback(sites * processes)
    for end in ends:
        end.site_names = ["east", "east", "west", "west"]
    walking = [stage for end in ends for stage in stage_transports(end, stages // processes)]
    assert [stage.site for stage in walking] == list(range(sites * stages))
    like = [jax.ShapeDtypeStruct((), jnp.float32, sharding=number_on_device(0).sharding)]
    for sender, receiver in ((0, 1), (1, 2), (3, 4), (7, 0)):
        fetch = walking[receiver].fetch(sender, KEY, like)
        walking[sender].offer(receiver, KEY, [number_on_device(sender)])
        assert float(fetch.result()[0]) == sender
    of_sites = [between_sites(end, sites) for end in ends]
    assert [end.site for end in of_sites] == [0, 0, 1, 1]
    assert of_sites[3].site_names == ["east", "west"]
    fetch = of_sites[1].fetch(1, KEY, like)
    of_sites[3].offer(0, KEY, [number_on_device(5)])
    assert float(fetch.result()[0]) == 5.0


def test_the_rate_to_a_site_is_that_to_the_processes_that_get_most(monkeypatch):
    end = loopback(4)[1]  # of two sites with two groups of processes: the last stage of the first
    assert between_sites(end, 2).measured() == {}
    links = {0: MeasuredLink(0.0, 9e9), 2: MeasuredLink(0.02, 1e8), 3: MeasuredLink(0.03, 5e3)}
    monkeypatch.setattr(end, "measured", lambda: links)
    end.counters[2].acknowledged_bytes, end.counters[3].acknowledged_bytes = 1_000_000, 100
    assert between_sites(end, 2).measured() == {1: MeasuredLink(0.03, 1e8)}


def test_a_stage_that_fails_ends_those_that_wait_for_it():
    site, _ = sites_of_stages(2, 3)

    def work(number, walk):
        if number == 2:
            raise RunError("transport: site west is lost")
        return walk.transport.fetch(number + 1, KEY, LIKE).result()

    with pytest.raises(RunError, match="site west is lost"):
        site_walks(site).side_by_side(work)


def test_the_wait_of_a_process_is_the_mean_of_its_stages():
    site, _ = sites_of_stages(2, 2)
    walks = site_walks(site)
    for walk, waited in zip(walks.walks, (0.0, 3.0), strict=True):
        to_others = LinkTraffic(messages_in_flight=4, wait_seconds={"activation": waited})
        walk.traffic = {2: to_others, 3: to_others, 1 - walk.transport.site: to_others}
    of_site = LinkTraffic(messages_in_flight=4, wait_seconds={"activation": 3.0})
    assert walks.traffic == {1: of_site}
