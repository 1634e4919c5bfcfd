"""`geojax plan --schedules` as a person runs it."""

import json
import re
from pathlib import Path

import matplotlib.image
import pytest

from geojax.accelerators import accelerator_named
from geojax.cli.main import run
from geojax.models import ModelConfig
from geojax.models.flops import model_flops

QUICKSTART = str(Path(__file__).parents[3] / "configs" / "quickstart.yaml")
OF_SCHEDULES = ("--schedules", "--rows", "0")
TINY = (QUICKSTART, "--model", "tiny", "--batch.sequence_length", "256")
ONE_RANK = (*TINY, "--mesh.data", "1")
FOUR_STAGES = (*ONE_RANK, "--dc.role", "stage", "--stages-per-site", "2")
TWENTY = ("--stage-seconds", "20ms")
MEASURED = (*FOUR_STAGES, *TWENTY)


def test_schedules_are_compared_and_drawn(capsys, tmp_path):
    folder = tmp_path / "pictures"
    options = (*OF_SCHEDULES, "--memory-limit", "3", "--pictures", str(folder))
    assert run(["plan", *MEASURED, *options]) == 0
    out = capsys.readouterr().out
    assert "\nDoes it fit?\n" in out
    _, out = out.split("\nWhich pipeline schedule?\n")
    assert out.startswith("one pipeline through east, west (dc.role stage); lock-step has")
    assert "5.77M parameters in 4 stages, 2 in each of east, west; layers of each: 1 2 2 1" in out
    assert "east-west (stages 1 to 2): latency 10.5 ms + 262 kB in 209.7 us" in out
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    for name in ("gpipe", "1f1b", "zero_bubble_h1", "geopipe", "latency_hiding"):
        assert " ms" in rows[name]
    assert "8 > 3" in rows["gpipe"]
    assert "zbv is left out: 6 layers cannot be cut into 8 stages" in out
    best = "best for stages on their own with at most 3 microbatches in flight: latency_hiding"
    assert best in out
    assert "bandwidth point with 3 in flight: " in out
    assert "east-west has 1.25 GB/s" in out

    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    titles = [event["args"]["name"] for event in trace if event["name"] == "process_name"]
    names = [title.partition(":")[0] for title in titles]
    assert names[:3] == ["branch_free", "gpipe", "1f1b"]
    assert "1f1b, lock-step" in names
    for name in ("timelines.png", "lock-step.png", "bandwidth.png"):
        assert matplotlib.image.imread(folder / name).std() > 0.05


def simulated(capsys, monkeypatch, *arguments):
    """The section alone, without a sweep of bandwidths."""
    monkeypatch.setattr("geojax.cli.plan_schedules._bandwidth", lambda *_: "the bandwidth point")
    assert run(["plan", *arguments, *OF_SCHEDULES]) == 0
    _, section = capsys.readouterr().out.split("\nWhich pipeline schedule?\n")
    return section.splitlines()


def test_the_pipeline_of_the_config_is_the_one_that_is_simulated(capsys, monkeypatch):
    pipeline = ("--pipeline.schedule", "1f1b", "--batch.microbatches", "8")
    arguments = (*ONE_RANK, "--mesh.stage", "2", *pipeline, *TWENTY)
    through = ("--dc.role", "stage", "--pipeline.hop_ticks", "2")
    lines = simulated(capsys, monkeypatch, *arguments, *through)
    assert lines[0] == "one pipeline through east, west (dc.role stage); lock-step has hop_ticks 2"
    (marked,) = [line for line in lines if "(config)" in line]
    assert marked.startswith("1f1b (config) ")
    (own,) = [line for line in lines if line.startswith("geojax train runs 1f1b, hop_ticks 2:")]
    assert " in lock-step, 7.72 ktokens/s, 7 microbatches in flight, whose layers hold " in own

    batch = ("--batch.global_batch_size", "16")
    lines = simulated(capsys, monkeypatch, *arguments, *batch)
    assert lines[0].startswith("a pipeline in each of east, west (dc.role data), here")
    assert "2 stages, 2 in east" in lines[1]
    assert lines[2].endswith("microbatches: 8 of 1 x 256 tokens a data-parallel rank")
    assert "the bandwidth point" not in lines


def test_throughput_and_utilization_are_those_of_the_peak(capsys, monkeypatch):
    arguments = (*FOUR_STAGES, "--accelerator", "h100-sxm", "--efficiency", "1")
    lines = simulated(capsys, monkeypatch, *arguments)
    (best,) = [line for line in lines if line.startswith("best for lock-step")]
    found = re.search(r", ([\d.]+) ms, ([\d.]+) ktokens/s, ([\d.]+)% MFU", best)
    assert found, best
    tokens = 8 * 256 / float(found[1]) * 1e3
    assert float(found[2]) == pytest.approx(tokens / 1e3, rel=0.01)
    flops = tokens * model_flops(ModelConfig.load("tiny"), 256)
    peak = 4 * accelerator_named("h100-sxm").peak("float32")
    assert float(found[3]) == pytest.approx(100 * flops / peak, abs=0.06)


def test_hops_that_one_program_cannot_hide_are_named(capsys, monkeypatch):
    arguments = (*FOUR_STAGES, "--stage-seconds")
    hidden = simulated(capsys, monkeypatch, *arguments, "20ms")
    assert not [line for line in hidden if "longer than" in line]
    (line,) = [
        line for line in simulated(capsys, monkeypatch, *arguments, "10ms") if "longer" in line
    ]
    assert line.startswith(
        "east-west: a hop of 10.71 ms is longer than a stage's 10 ms for a micro"
    )


def test_without_a_pipeline_one_through_all_sites_is_assumed(capsys, monkeypatch):
    lines = simulated(capsys, monkeypatch, *ONE_RANK, *TWENTY)
    assert lines[0].startswith("the config has no pipeline: assumed is one through east, west, a ")
    assert not [line for line in lines if "(config)" in line or "geojax train" in line]


def test_one_stage_is_refused(capsys, tmp_path):
    site = "{name: here, hosts: 1, accelerators_per_host: 8, accelerator: simulated}"
    (tmp_path / "one.yaml").write_text(f"sites: [{site}]\n")
    one_site = ("--topology", str(tmp_path / "one.yaml"), "--mesh.dc", "1", "--mesh.data", "8")
    assert run(["plan", QUICKSTART, *one_site, *TWENTY, *OF_SCHEDULES]) == 2
    message = "one stage is no pipeline: raise mesh.stage, or give --stages-per-site, such as 2"
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.yaml",), "error: nowhere.yaml: no such file"),
        (
            FOUR_STAGES,
            "the float32 peak of accelerator 'simulated' of site 'east' is unknown. Name another",
        ),
        ((*FOUR_STAGES, "--accelerator", "h10-sxm"), "did you mean 'h100-sxm'?"),
        ((QUICKSTART, "--topology", "null"), "--schedules requires a topology"),
        ((QUICKSTART, "--topology", "simulated-4x2"), "dc must be 4"),
        ((QUICKSTART, "--stages-per-site", "2"), "2 stages of 4 devices each need 8 accelerators"),
        (
            (*MEASURED, "--microbatches", "3"),
            "divide the 8 sequences of each of the 1 data-parallel",
        ),
        ((*MEASURED, "--microbatches", "0"), "geojax plan: microbatches: input should be"),
        ((*MEASURED, "--memory-limit", "0"), "geojax plan: memory_limit: input should be"),
        ((*MEASURED, "--efficiency", "1.5"), "geojax plan: efficiency: input should be less"),
        ((*FOUR_STAGES, "--stage-seconds", "0"), "stage_seconds: input should be greater than or"),
        ((*FOUR_STAGES, "--stage-seconds", "1us"), "times the 1e-06 s of a stage for a microbat"),
        ((*FOUR_STAGES, "--efficiency", "1e-300"), "efficiency: input should be greater than or"),
        ((*FOUR_STAGES, "--stage-seconds", "20m"), "stage_seconds: '20m' is not a number of sec"),
        ((*MEASURED, "--zero.stag", "3"), "did you mean 'stage'?"),
        (
            (*MEASURED, "--model.num_hidden_layers", "3"),
            "3 layers cannot be cut into 4",
        ),
        ((*MEASURED, "--pictures", QUICKSTART), "--pictures"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, message):
    assert run(["plan", *arguments, *OF_SCHEDULES]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
