"""The parts of reading HLO, each on text as XLA prints it."""

import numpy as np
import pytest

from geojax.hlo.module import HloParseError, parse_module, shape_bytes
from geojax.hlo.replica_groups import parse_groups, parse_id_lists
from geojax.hlo.trip_count import trip_count


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("f32[8]{0}", 32),
        ("bf16[4,8]{1,0:T(8,128)(2,1)}", 64),
        ("pred[3]", 3),
        ("f64[]", 8),
        ("c64[2]{0}", 16),
        ("f8e4m3fn[5,5]{1,0}", 25),
        ("s4[3]{0}", 2),
        ("f32[0,7]{1,0}", 0),
        ("token[]", 0),
        ("(f32[8]{0}, (s32[], u8[5]{0}), token[])", 41),
        ("f32[<=16,2]{1,0}", 128),
    ],
)
def test_bytes_of_a_shape(shape, expected):
    assert shape_bytes(shape) == expected


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("{{0,4},{1,5},{2,6,3,7}}", [[0, 4], [1, 5], [2, 6, 3, 7]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[1,8]<=[8]", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("[4,2]<=[2,2,2]T(0,2,1)", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['dc'=2,'data'=4] {'data'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['dc'=2,'data'=4] {'dc'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['dc'=2,'data'=4] {'dc','data'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['dc'=2,'one'=1,'a'=2,'b'=2] {'b','a'}", [[0, 2, 1, 3], [4, 6, 5, 7]]),
        ("mesh['dc'=2,'one'=1,'data'=4] {'one'}", [[n] for n in range(8)]),
        ("mesh['x'=8] {'x':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['x'=8] {'x':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['x'=8] {'x':(2)4}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['x'=8] {'x':(1)2,'x':(4)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (
            "mesh['a'=1,'b'=2,'c'=4,'d'=1], device_ids=([4,2]T(1,0)) {'c'}",
            [[0, 2, 4, 6], [1, 3, 5, 7]],
        ),
        ("mesh['x'=2,'y'=2], device_ids=([[3,2],[1,0]]) {'y'}", [[3, 2], [1, 0]]),
        ("mesh[x=2,y=2], device_ids=(3,2,1,0) {x}", [[3, 1], [2, 0]]),
    ],
)
def test_replica_groups(printed, expected):
    assert parse_groups(printed, 8) == expected


def test_replica_groups_of_an_unknown_form_are_refused():
    with pytest.raises(HloParseError, match="replica groups of an unknown form: 'ring"):
        parse_groups("ring(8)", 8)


def test_source_target_pairs():
    assert parse_id_lists("{{0,1},{1,2},{7,0}}") == [[0, 1], [1, 2], [7, 0]]


COMPILED = """
HloModule jit_f, is_scheduled=true, replica_count=1, num_partitions=8

FileNames
1 "train.py"

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b), metadata={op_name="jit(f)/add, (x=1) {y}" source_file="a, b"}
}

ENTRY %main.0_spmd (param.1: f32[8]) -> f32[8] {
  %param.1 = f32[8]{0:T(256)} parameter(0), sharding={devices=[8]<=[8]}
  %pair = (f32[8]{0}, /*index=1*/f32[2]{0}) custom-call(f32[8]{0} %param.1), custom_call_target="("
  ROOT %r = f32[8]{0} all-reduce(%param.1), replica_groups={{0,1},{2,3}}, to_apply=%sum
}
"""

LOWERED = """
HloModule jit__lambda, entry_computation_layout={(f64[8]{0})->f64[8]{0}}

region_0.2 {
  Arg_0.1 = f64[] parameter(0)
  ROOT add.3 = f64[] add(Arg_0.1, Arg_0.1)
}

ENTRY main.6 {
  x.1 = f64[8]{0} parameter(0)
  ROOT call.7 = f64[8]{0} call(x.1), to_apply=region_0.2, frontend_attributes={inlineable="false"}
}
"""


def test_a_compiled_module():
    module = parse_module(COMPILED)
    assert module.partitions == 8
    assert module.entry == "main.0_spmd"
    entry = module.computations[module.entry]
    assert [instruction.opcode for instruction in entry] == [
        "parameter",
        "custom-call",
        "all-reduce",
    ]
    reduce = entry.instructions["r"]
    assert entry.root == "r"
    assert reduce.operands == ("param.1",)
    assert reduce.attributes["replica_groups"] == "{{0,1},{2,3}}"
    assert reduce.calls == ("sum",)
    assert entry.operand_bytes(reduce) == 32
    assert entry.instructions["pair"].shape == "(f32[8]{0}, f32[2]{0})"
    assert entry.instructions["pair"].operands == ("param.1",)


def test_a_lowered_module():
    module = parse_module(LOWERED)
    assert module.partitions is None
    assert module.computations["main.6"].instructions["call.7"].calls == ("region_0.2",)


@pytest.mark.parametrize("text", ["", "module @jit_f { }", "HloModule jit_f\n\nf {\n}\n"])
def test_what_is_no_module_is_refused(text):
    with pytest.raises(HloParseError, match="this is not an HLO module"):
        parse_module(text)


def test_a_program_with_replicas_is_refused():
    with pytest.raises(HloParseError, match="has 4 replicas"):
        parse_module(COMPILED.replace("replica_count=1", "replica_count=4"))


def loop_text(
    *, start="0", step="1", compare="i, n", direction="LT", limit="7", config="", op="add"
):
    return f"""
HloModule jit_f, num_partitions=8

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %p = (s32[], f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8]{{0}} get-tuple-element(%p), index=1
  %step = s32[] constant({step})
  %next = s32[] {op}(%i, %step)
  ROOT %t = (s32[], f32[8]{{0}}) tuple(%next, %x)
}}

%cond (p: (s32[], f32[8])) -> pred[] {{
  %p = (s32[], f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant({limit})
  ROOT %lt = pred[] compare({compare}), direction={direction}
}}

ENTRY %main (x: f32[8]) -> (s32[], f32[8]) {{
  %x = f32[8]{{0}} parameter(0)
  %zero = s32[] constant({start})
  %copied = s32[] copy(%zero)
  %init = (s32[], f32[8]{{0}}) tuple(%copied, %x)
  ROOT %loop = (s32[], f32[8]{{0}}) while(%init), condition=%cond, body=%body{config}
}}
"""


def count_of(text):
    module = parse_module(text)
    entry = module.computations[module.entry]
    return trip_count(module, entry, entry.instructions["loop"])


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({}, range(0, 7)),
        ({"start": "2", "step": "3"}, range(2, 7, 3)),
        ({"start": "2", "step": "3", "limit": "8"}, range(2, 8, 3)),
        ({"direction": "LE"}, range(0, 8)),
        ({"start": "9", "step": "-2", "direction": "GT", "limit": "0"}, range(9, 0, -2)),
        (
            {"start": "9", "step": "2", "direction": "GE", "limit": "0", "op": "subtract"},
            range(9, -1, -2),
        ),
        ({"direction": "NE"}, range(0, 7)),
        ({"start": "9"}, range(0)),
        ({"compare": "n, i", "direction": "GT"}, range(0, 7)),
        ({"config": ', backend_config={"known_trip_count":{"n":"11"}}'}, range(11)),
    ],
)
def test_trip_count(changes, values):
    assert count_of(loop_text(**changes)) == len(values)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "0"},
        {"step": "-1"},
        {"direction": "NE", "step": "2"},
        {"direction": "EQ"},
        {"compare": "i, i"},
        {"op": "multiply"},
    ],
)
def test_a_loop_of_unknown_length_has_no_count(changes):
    assert count_of(loop_text(**changes)) is None


def test_trip_count_when_compare_and_add_are_fused():
    fused = """
%fused_add (a: s32[], b: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %sum = s32[] add(%a, %b)
}

%fused_less (b: s32[], a: s32[]) -> pred[] {
  %b = s32[] parameter(1)
  %a = s32[] parameter(0)
  ROOT %less = pred[] compare(%a, %b), direction=LT
}

%body"""
    text = (
        loop_text()
        .replace("\n%body", fused, 1)
        .replace("s32[] add(%i, %step)", "s32[] fusion(%i, %step), kind=kLoop, calls=%fused_add")
        .replace("compare(i, n), direction=LT", "fusion(%i, %n), kind=kLoop, calls=%fused_less")
    )
    assert "calls=%fused_less" in text
    assert count_of(text) == 7


def test_groups_cover_every_device_once():
    for printed in ("[4,2]<=[2,4]T(1,0)", "mesh['x'=8] {'x':(2)2}", "mesh['a'=2,'b'=4] {'b'}"):
        assert sorted(np.concatenate(parse_groups(printed, 8)).tolist()) == list(range(8))
