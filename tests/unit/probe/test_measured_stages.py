"""The pieces of a model, measured and simulated with."""

import random
import types
from pathlib import Path

import jax
import pytest
import yaml

from geojax.cli.main import run
from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.mesh import AXES, make_mesh
from geojax.pipeline.schedule import Placement
from geojax.pipeline.simulation.stage_times import PieceTimes, StageTimes
from geojax.planner.abstract_mesh import abstract_mesh
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.staged_pipeline import StagedPipeline
from geojax.probe import stages
from geojax.probe.context import ProbeContext
from geojax.probe.stages import measured_stages, stage_mesh
from geojax.step.config_plan import plan_without_pipeline
from geojax.topology import Process, Topology

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
SMALL = (
    "--model",
    "tiny",
    "--model.hidden_size",
    "64",
    "--model.intermediate_size",
    "96",
    "--model.vocab_size",
    "256",
)
LAYOUT = ("--mesh", "{dc: 2, tensor: 2, stage: 2}", "--batch.sequence_length", "64")


@pytest.fixture(scope="module")
def config():
    return RunConfig.load(QUICKSTART, [*SMALL, *LAYOUT])


@pytest.fixture(scope="module")
def times(config):
    topology = ProbeContext.of((Process(0, None, "here", 8, "cpu"),), None, 2).topology
    mesh = make_mesh(dc=2, tensor=2, devices=jax.devices()[:4])
    context = ProbeContext((Process(0, None, "here", 4, "cpu"),), topology, mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "_LOOP_SECONDS", 0.03)
        patch.setattr(stages, "_ROUNDS", 3)
        plan = plan_without_pipeline(config, stage_mesh(context, tensor=2))
        return measured_stages(config.model, plan, context, sequences=2, sequence_length=64)


def test_every_piece_takes_its_time(config, times):
    assert [site.name for site in times.sites] == ["east", "west"]
    assert (times.sequences, times.sequence_length, times.dtype) == (2, 64, "float32")
    assert times.parallelism == config.model_parallelism
    for site in times.sites:
        assert min(site.layer.kinds) > 0
        assert site.layer_whole_backward > 0
        assert site.head.forward > 0
        assert site.embedding.backward == 0


def test_a_busy_host_makes_no_piece_free(monkeypatch):
    now, noise = 0.0, random.Random(0)

    def runs(seconds):
        def loop(count):
            nonlocal now
            now += 1e-3 + seconds * int(count) + noise.uniform(0, 0.02)

        return loop

    monkeypatch.setattr(stages, "time", types.SimpleNamespace(perf_counter=lambda: now))
    pieces = (2e-6, 3e-4, 0.5)
    measured = stages._seconds([runs(seconds) for seconds in pieces])
    assert measured == pytest.approx(pieces, rel=0.1)


def test_sites_that_are_stages_have_no_pipeline_while_pieces_are_measured():
    config = RunConfig.load(QUICKSTART, [*SMALL, *LAYOUT, "--dc.role", "stage"])
    assert config.pipeline_stages == 4
    plan = plan_without_pipeline(
        config, abstract_mesh(dict.fromkeys(AXES, 1) | {"dc": 2, "tensor": 2})
    )
    assert plan.staged_layers is None
    assert plan.layout.dc.role == "data"


def test_the_simulator_computes_with_them(config, times, tmp_path):
    times.save(tmp_path / "times.yaml")
    read = StageTimes.load(tmp_path / "times.yaml")
    assert read == times
    layer = PieceTimes(forward=0.001, backward=0.0015, weight=0.0005)
    nothing = PieceTimes(forward=0, backward=0, weight=0)
    head = PieceTimes(forward=0.002, backward=0.001, weight=0.003)
    pieces = {"layer": layer, "embedding": nothing, "head": head}
    # A split backward takes a quarter longer than these 1.6 ms.
    east = read.sites[0].model_copy(update={**pieces, "layer_whole_backward": 0.0016})
    slower = PieceTimes(**{name: 2 * value for name, value in layer.model_dump().items()})
    west = east.model_copy(update={"name": "west", "layer": slower, "layer_whole_backward": 0.0032})
    read = read.model_copy(update={"sites": (east, west)})
    layout = LayoutCandidate.made(
        sequence_length=64,
        microbatches=4,
        microbatch_size=2,
        mesh=dict(config.mesh) | {"dc": 2, "stage": 2, "data": 1},
        parallelism=dict(config.parallelism),
        dc={"role": "stage"},
        precision="fp32",
    )
    topology = Topology.load("simulated-2x4")  # of whose accelerators no peak is known
    staged = StagedPipeline(config.model, layout, topology, Calibration(stage_times=read))
    # 6 layers of 2.6 ms, or 5.2 ms in the west, and a head of 6 ms that a single layer is beside.
    assert staged.layers(Placement.linear(4)) == (2, 2, 1, 1)
    costs = staged.costs(Placement.linear(4))
    assert costs.forward == pytest.approx((0.002, 0.002, 0.002, 0.004))
    assert costs.backward == pytest.approx((0.0024, 0.0024, 0.0024, 0.0034))
    assert costs.weight == pytest.approx((0.0008, 0.0008, 0.0008, 0.0038))
    assert costs.split_surcharge == pytest.approx(0.25)
    alone = read.model_copy(update={"sites": (east,)})
    assert alone.of_site("north") == east
    with pytest.raises(UserError, match="measured in east, west, not in 'north'"):
        read.of_site("north")


def compared(capsys, tmp_path, times, *changes):
    path = tmp_path / "times.yaml"
    path.write_text(yaml.safe_dump(times))
    pairs = (*SMALL, *LAYOUT, "--batch.microbatches", "4", *changes)
    settings = dict(zip(pairs[::2], pairs[1::2], strict=True))  # changes come last
    arguments = [str(QUICKSTART), *(word for pair in settings.items() for word in pair)]
    options = ("--stage-times", str(path), "--schedules", "--rows", "0")
    code = run(["plan", *arguments, *options])
    return code, *capsys.readouterr()


def test_times_of_another_model_are_refused(capsys, tmp_path, times):
    content = times.model_dump(mode="json")
    code, _, error = compared(capsys, tmp_path, content, "--batch.sequence_length", "32")
    assert code == 2
    assert error.startswith("error: the stage times were measured for sequences=2, not 1; geoj")
    code, _, error = compared(
        capsys, tmp_path, content | {"sequences": 1}, "--batch.sequence_length", "32"
    )
    assert "for sequence_length=64, not 32" in error
    code, _, error = compared(
        capsys, tmp_path, content | {"sequences": 1}, "--model.hidden_size", "128"
    )
    assert "measured for another model; geojax probe CONFIG" in error
    code, _, error = compared(capsys, tmp_path, content, "--stage-seconds", "20ms")
    assert "stage_seconds and stage_times say the same" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--batch.global_batch_size", "8"),
            "error: unknown argument --batch.global_batch_size; without CONFIG there is no",
        ),
        (("--stage-times", "x.yaml"), "x.yaml: needs CONFIG and the check"),
        (("--output", "nowhere/a.yaml"), "nowhere/a.yaml: its folder does not exist"),
        (("--checks", "link"), "error: --checks link: there are devices, networks, links, hosts"),
        (
            ("--streams", "0"),
            "geojax probe: streams.0: input should be greater than or equal to 1, not 0 (int)\n",
        ),
        (("nowhere.yaml",), "error: nowhere.yaml: no such file"),
        (("a.yaml", "b.yaml"), "error: b.yaml: one CONFIG is enough"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, message):
    assert run(["probe", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
