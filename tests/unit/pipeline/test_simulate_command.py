"""`geojax simulate` as a person runs it."""

import json
from pathlib import Path

import matplotlib.image
import pytest

from geojax.cli.main import run

QUICKSTART = str(Path(__file__).parents[3] / "configs" / "quickstart.yaml")
FOUR_STAGES = (QUICKSTART, "--mesh.data", "1", "--stages-per-site", "2")
MEASURED = (*FOUR_STAGES, "--stage-seconds", "20ms")


def test_schedules_are_compared_and_drawn(capsys, tmp_path):
    folder = tmp_path / "simulation"
    assert run(["simulate", *MEASURED, "--memory-limit", "3", "--output", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "5.77M parameters in 4 stages, 2 in each of east, west; layers of each: 1 2 2 1" in out
    assert "east-west (stages 1 to 2): latency 10.5 ms + 262 kB in 209.7 us" in out
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    for name in ("gpipe", "one_f_one_b", "zero_bubble_h1", "extended_warmup", "latency_hiding"):
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
    assert names[:2] == ["gpipe", "one_f_one_b"]
    assert "one_f_one_b, lock-step" in names
    for name in ("timelines.png", "lock-step.png", "bandwidth.png"):
        assert matplotlib.image.imread(folder / name).std() > 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.yaml",), "error: nowhere.yaml: no such file"),
        (FOUR_STAGES, "the float32 peak of accelerator 'simulated' of site 'east'; name one"),
        ((*FOUR_STAGES, "--accelerator", "h10-sxm"), "did you mean 'h100-sxm'?"),
        ((QUICKSTART, "--topology", "null"), "topology: is needed to simulate"),
        ((QUICKSTART, "--topology", "simulated-4x2"), "dc must be 4"),
        ((QUICKSTART, "--stages-per-site", "2"), "2 stages of 4 devices each need 8 accelerators"),
        ((*MEASURED, "--microbatches", "3"), "divide the 8 rows of each of the 1 data-parallel"),
        ((*MEASURED, "--microbatches", "0"), "geojax simulate: microbatches: input should be"),
        ((*MEASURED, "--memory-limit", "0"), "geojax simulate: memory_limit: input should be"),
        ((*MEASURED, "--efficiency", "1.5"), "geojax simulate: efficiency: input should be less"),
        ((*FOUR_STAGES, "--stage-seconds", "20m"), "stage_seconds: '20m' is not a number of sec"),
        ((*MEASURED, "--zero.stag", "3"), "did you mean 'stage'?"),
        ((*MEASURED, "--model", "tiny", "--model.layers", "3"), "3 layers cannot be cut into 4"),
        ((*MEASURED, "--output", QUICKSTART), "--output"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, message):
    assert run(["simulate", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
