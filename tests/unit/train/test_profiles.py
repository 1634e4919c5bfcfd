"""Profiled steps of a compiled run, as XProf's reader has them."""

import jax
import pytest
from support.small_runs import prepare_corpus

import geojax

SCOPES = (
    "embedding",
    "forward_layers",
    "attention",
    "feed_forward",
    "head",
    "backward_layers",
    "gather_weights/all_gather data",
    "reduce_gradients/psum_scatter data",
    "reduce_gradients/psum dc",
    "sum_scalars/psum dc",
    "optimizer_update",
)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """The lines of a run of 4 steps, of which 2 and 3 are profiled, and its folder."""
    folder, lines = tmp_path_factory.mktemp("profiled"), []
    config = {
        "run_directory": str(folder / "run"),
        "steps": 4,
        "mesh": {"dc": 2, "data": 4},
        "simulate_devices": 8,
        "zero": {"stage": 2},
        "model": {
            "num_hidden_layers": 2,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 32,
        },
        "data": {"sources": [{"name": "sums", "prepared": str(prepare_corpus(folder))}]},
        "batch": {"global_batch_size": 8, "sequence_length": 32},
        "precision": "fp32",
        "profile": {"start": 2, "steps": 2},
    }
    with geojax.Trainer(config, log=lines.append) as trainer:
        assert trainer.fit().step == 4
    return lines, folder / "run" / "profile" / "step-00000002" / "process-0"


def test_a_trace_has_exactly_the_profiled_steps_and_what_the_host_did(profiled):
    (trace,) = profiled[1].rglob("*.xplane.pb")
    planes = list(jax.profiler.ProfileData.from_file(str(trace)).planes)
    events = [each for plane in planes for line in plane.lines for each in line.events]
    steps = {dict(each.stats)["step_num"] for each in events if each.name == "train"}
    assert steps == {2, 3}
    for kind in ("data", "dispatch"):
        assert {dict(each.stats)["step"] for each in events if each.name == kind} == {2, 3}
    modules = [dict(each.stats).get("hlo_module") for each in events]
    assert "jit_train_step" in modules


def test_layers_collectives_and_the_update_have_names(profiled):
    (trace,) = profiled[1].rglob("*.xplane.pb")
    content = trace.read_bytes()
    assert [scope for scope in SCOPES if scope.encode() not in content] == []


def test_a_line_says_where_it_lies_beside_a_timeline_and_a_snapshot(profiled):
    lines, folder = profiled
    (line,) = [each for each in lines if each.startswith("profile of ")]
    assert line.startswith("profile of steps 2 to 3 on process 0: ")
    assert f"in {folder}" in line
    assert len(list(folder.rglob("*.trace.json.gz"))) == 1
    assert (folder / "memory.pprof").is_file()
