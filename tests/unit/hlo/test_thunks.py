"""The launches of a program, read from the dump of XLA's runtime for GPUs."""

import pytest

from geojax.hlo import HloParseError
from geojax.hlo.thunks import parse_launches, read_launches

SEQUENCE = """
001: kCustomKernel [source        | next=003 (1)  ] loop_transpose_fusion grid: [114688, 1, 1]
003: kAsyncStart   [prev=001 (1)  | next=012 (9)  ] stream=communication_stream[0], async_id=3
    002: kAllGather [source | sink] kAllGather
004: kWhile        [prev=003 (1)  | next=012 (1)  ]
condition:
    005: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
  body:
    007: kAsyncStart   [prev=001 (1)  | next=012 (9)  ] stream=communication_stream[0], async_id=7
        006: kReduceScatter [source | sink] kReduceScatter
    017: kAsyncStart   [prev=001 (1)  | next=012 (9)  ] stream=computation_stream[1], async_id=17
        018: kDynamicSliceFusion [source | sink] params=1, results=1
    008: kReduceScatter [prev=001 (1) | next=010 (2)  ] kReduceScatter
    010: kAsyncStart   [prev=008 (1)  | next=012 (9)  ] stream=communication_stream[1], async_id=10
        009: kAllReduce [source | sink] kAllReduce
    011: kAsyncDone    [source        | sink          ] async_id=7
    012: kAsyncDone    [source        | sink          ] async_id=10
013: kAsyncDone    [source        | sink          ] async_id=3
015: kAsyncStart   [prev=001 (1)  | next=012 (9)  ] stream=communication_stream[1], async_id=15
    014: kCollectivePermute [source | sink] kCollectivePermute
016: kAsyncDone    [source        | sink          ] async_id=15
"""
NAMES = {
    3: "gather",
    7: "scatter",
    8: "waiting",
    10: "sum",
    15: "hop",
}


def metadata(names):
    return "".join(
        f'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "{name}"\n'
        f"    thunk_id: {number}\n  }}\n}}\n"
        for number, name in names.items()
    )


def test_streams_and_what_is_in_flight_together():
    launches = {each.instruction: each for each in parse_launches(SEQUENCE, metadata(NAMES))}
    streams = {name: launch.stream for name, launch in launches.items()}
    assert streams == {"gather": "0", "scatter": "0", "waiting": None, "sum": "1", "hop": "1"}
    assert launches["sum"].together == {"gather", "scatter"}
    assert launches["scatter"].together == launches["gather"].together == {"sum"}
    assert not launches["hop"].together
    assert not launches["waiting"].together


def test_a_dump_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(HloParseError, match="holds 0 thunk sequences"):
        read_launches(tmp_path)
    with pytest.raises(HloParseError, match="do not name thunk 008"):
        parse_launches(SEQUENCE, metadata({3: "gather", 7: "scatter"}))
