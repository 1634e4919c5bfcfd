"""Collectives of a compiled step by axes and kind, with streams and what is in flight beside."""

from geojax.hlo.overlap import Flight
from geojax.hlo.thunks import Launch
from geojax.hlo.traffic import Collective, Traffic
from geojax.planner.compiled_step import messages_by_kind

MESH = (("dc", 2), ("data", 4))


def collective(name, kind, axes, payload, executions=1):
    ranks = {"dc": 2, "data": 4}[axes]
    return Collective(
        name,
        kind,
        (axes,),
        ranks,
        ranks,
        payload,
        executions,
        in_loop=executions > 1,
        at_least=False,
        conditional=False,
    )


def test_streams_waits_and_what_is_in_flight_together():
    across = collective("sum", "all-reduce", "dc", 2**20)
    beside = collective("scatter", "reduce-scatter", "data", 2**20, executions=3)
    waiting = collective("last-scatter", "reduce-scatter", "data", 2**18)
    launches = (
        Launch("sum-start", "1", {"scatter-start"}),
        Launch("scatter-start", "0", {"sum-start"}),
        Launch("last-scatter", None),
    )
    in_flight = Flight(across, "sum-start", 2, 5), Flight(beside, "scatter-start", 0, 5)
    traffic = Traffic(MESH, (across, beside, waiting))
    sums, scatters = messages_by_kind(traffic, in_flight, launches)
    assert (sums.kind, sums.axes, sums.streams) == ("all-reduce", ("dc",), {"1": 1})
    assert sums.bytes_beside_compute == sums.bytes_sent == sums.together["data"]
    assert not sums.bytes_awaited
    assert scatters.streams == {"0": 3, "compute": 1}
    assert scatters.bytes_awaited == waiting.bytes_sent > 0
    assert scatters.together == {"dc": beside.bytes_sent}
    assert not scatters.bytes_beside_compute
    assert scatters.to_json()["together"] == {"dc": float(beside.bytes_sent)}
