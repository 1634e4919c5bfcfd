"""`geojax plan` as a person runs it."""

import re
from pathlib import Path

import pytest
import yaml

from geojax.cli.main import run
from geojax.config.run_config import RunConfig
from geojax.models.parallel.parallelism import Parallelism
from geojax.pipeline.simulation.stage_times import PieceTimes, SiteTimes, StageTimes
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.resolve.run_layout import layout_of_run, run_settings
from geojax.topology import Topology

CONFIG = Path(__file__).parents[3] / "configs" / "llama3-8b-2x8.yaml"
QUICKSTART = CONFIG.parent / "quickstart.yaml"
SMALL = (
    *("--model.num_hidden_layers", "4"),
    *("--batch.global_batch_size", "32", "--batch.microbatches", "2"),
)
REQUEST = ("--topology", "two-h100-sites-2x8", "--global-batch", "32", "--sequence-length", "2048")


def printed(capsys, *arguments):
    assert run(["plan", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments):
    assert run(["plan", *map(str, arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_config_becomes_a_table_a_config_and_pictures(capsys, tmp_path):
    best, pictures = tmp_path / "best.yaml", tmp_path / "pictures"
    files = ("--output", best, "--pictures", pictures)
    more = (
        "--rows",
        3,
        "--explain",
        2,
        "--tokens",
        "1T",
        "--trace",
        1,
        "--sample.max_new_tokens",
        "7",
    )
    out = printed(capsys, CONFIG, *SMALL, *files, *more)
    assert "on 2 sites of 8 h100-sxm (two-h100-sites-2x8), 32 sequences of 8192 tokens" in out
    assert re.findall(r"^[A-Z].*\?$", out, re.MULTILINE) == QUESTIONS
    assert re.search(r"^row 1 saves \S+% of the \S+ s of the config's own layout$", out, re.M)
    assert "east-west: 12.5 GB/s, round trip 21 ms" in out
    assert re.search(r"[\d,]+ layouts fit, \d+ of them were timed, in .* refused: ", out)
    for heading in ("role", "data", "tensor", "step", "MFU", "of one site", "peak rate"):
        assert f" {heading} " in out.replace("\n", " \n")
    assert len(re.findall(r"^[123]  +", out, re.MULTILINE)) == 6, "two tables of three rows"
    assert "\n1 before 2 by " in out
    assert "\nrow 1 is limited by " in out
    assert "\n10% more would save: " in out
    assert re.search(r"262k tokens a step, \S+ a day; 1T tokens take \S+ days", out)
    assert re.search(r" s exposed: matrix products \(", out)
    assert "not modelled: host time" in out
    assert re.search(r"^1: traced \S+ GB a device, \S+ GB in closed form; it fits$", out, re.M)
    assert f"\n{best}: layout 1, for geojax train {best}\n" in out
    written = RunConfig.load(best)
    assert written.model.num_hidden_layers == 4
    assert written.sample.max_new_tokens == 7, "what the plan does not choose is kept"
    assert written.mesh.devices == 16
    for name in ("roles.png", "step.png"):
        assert (pictures / name).read_bytes().startswith(b"\x89PNG")
    other = ("--topology", "two-h100-sites-2x64", "--rows", "1", "--global-batch", "64")
    out = printed(capsys, CONFIG, *SMALL[:2], *SMALL[4:], *other)
    assert "(two-h100-sites-2x64), 64 sequences of 8192 tokens" in out
    explained = printed(capsys, CONFIG, *SMALL, "--rows", 1, "--explain", best)
    assert f"\n{layout_of_run(written)}\n" in explained


def test_a_model_needs_a_topology_and_a_batch(capsys, tmp_path):
    model = tmp_path / "small.yaml"
    content = yaml.safe_load((CONFIG.parent / "model" / "tiny.yaml").read_text())
    model.write_text(yaml.safe_dump(content | {"max_position_embeddings": 2048}))
    best = tmp_path / "best.yaml"
    out = printed(capsys, model, *REQUEST, "--rows", 1, "--output", best)
    assert "5.77M parameters" in out
    written = RunConfig.load(best)
    assert written.topology == "two-h100-sites-2x8"
    assert written.batch.global_batch_size == 32
    assert written.precision == "bf16"
    line = refused(capsys, model, "--topology", "two-h100-sites-2x8")
    assert line == "error: geojax plan MODEL needs --global-batch and --sequence-length as well"
    assert "unknown argument --mesh.data" in refused(capsys, model, *REQUEST, "--mesh.data", "2")


def test_measured_times_take_the_place_of_peaks(capsys, tmp_path):
    config = RunConfig.load(CONFIG, SMALL)
    piece = PieceTimes(forward=0.010, backward=0.012, weight=0.008)
    measured = StageTimes(
        model=config.model,
        sequences=1,
        sequence_length=8192,
        dtype="bfloat16",
        remat="selective",
        parallelism=Parallelism(),
        sites=(SiteTimes(name="east", layer=piece, embedding=piece, head=piece),),
    )
    path = tmp_path / "times.yaml"
    measured.save(path)
    given = (CONFIG, *SMALL, "--stage-times", path, "--measured", "--rows", "2")
    out = printed(capsys, *given, "--explain", "1")
    assert "layers (measured) (geojax probe --stage-times)" in out
    assert re.search(r"not measured \d+", out)
    refusal = refused(capsys, *given, "--precisions", "fp32")
    assert "no layout that fits has the microbatch, remat, precision" in refusal


def test_an_impossible_request_says_what_would_work(capsys):
    line = refused(capsys, "llama3-70b", *REQUEST)
    assert line.startswith("error: no layout fits: the least that one needs on a device is ")
    assert line.endswith("would work")
    line = refused(capsys, CONFIG, *SMALL, "--rows", "1", "--explain", "2")
    assert line == "error: --explain 2: the table has the rows 1 to 1"
    line = refused(capsys, "llama3-8b", *REQUEST, "--precisions", "bf15")
    assert "invalid choice 'bf15' for argument '--precisions'" in line


QUESTIONS = [
    "Does it fit?",
    "How long is a step, and why?",
    "What crosses the link?",
    "What would be faster?",
]


def test_a_config_that_cannot_be_planned_says_why_in_its_page(capsys):
    out = printed(capsys, QUICKSTART)
    assert re.findall(r"^[A-Z].*\?$", out, re.MULTILINE) == QUESTIONS
    assert "\nWhat would be faster?\nnot searched: nothing is known of the float32 peak of" in out


@pytest.mark.parametrize(
    "asked", [("--trace", 1), ("--roles", "data"), ("--explain", "1"), ("--output", "best.yaml")]
)
def test_a_config_that_cannot_be_planned_is_refused_if_layouts_are_asked_for(capsys, asked):
    assert "nothing is known of the float32 peak of" in refused(capsys, QUICKSTART, *asked)


def test_a_layout_that_cannot_be_elsewhere_is_left_out_there(capsys, tmp_path):
    topology = Topology.load("two-h100-sites-2x8").model_dump(mode="json", exclude={"name"})
    path = tmp_path / "east.yaml"
    path.write_text(yaml.safe_dump(topology | {"sites": topology["sites"][:1], "links": []}))
    out = printed(capsys, CONFIG, *SMALL, "--topology", path, "--rows", 1)
    assert "\nthe config's own layout is left out: dc=2, but topology 'east' has 1 site" in out
    assert re.findall(r"^[A-Z].*\?$", out, re.MULTILINE) == QUESTIONS[-1:]
    line = refused(capsys, CONFIG, *SMALL, "--topology", path, "--rows", 0)
    assert line.startswith("error: dc=2, but topology 'east' has 1 site")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((CONFIG, "--target", "cpu:8"), "--target requires --compile; add it, or remove --target"),
        ((CONFIG, "--microbatches", "4"), "--microbatches requires --schedules; add it"),
        ((CONFIG, "--rows", 0, "--trace", 1), "--rows 0 leaves out the search, of which another"),
        (("llama3-8b", *REQUEST, "--schedules"), "--schedules requires the config of a run"),
        (("llama3-8b", *REQUEST, "--rows", 0), "--rows 0 requires the config of a run; llama3-8b"),
    ],
)
def test_options_that_do_not_go_together_are_refused(capsys, options, message):
    assert message in refused(capsys, *options)


def test_what_cannot_be_written_is_found_before_the_search(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("geojax.planner.search.search.search", None)
    (tmp_path / "file").touch()
    line = refused(capsys, CONFIG, *SMALL, "--pictures", tmp_path / "file" / "pictures")
    assert line == f"error: --pictures: {tmp_path}/file is no folder; name another one"
    line = refused(capsys, CONFIG, *SMALL, "--output", tmp_path)
    assert line == f"error: --output: {tmp_path} is a folder; name a file in it"
    line = refused(capsys, CONFIG, *SMALL, "--json", tmp_path / "none" / "page.json")
    assert line == f"error: --json: {tmp_path}/none is no folder; name another one"


def unlike_sites(folder, hosts, kind="a100-sxm-80gb"):
    """A topology of 8 H100 beside so many hosts of another kind."""
    topology = Topology.load("two-h100-sites-2x8").model_dump(mode="json", exclude={"name"})
    topology["sites"][1] |= {"hosts": hosts, "accelerator": kind}
    path = folder / "unlike.yaml"
    path.write_text(yaml.safe_dump(topology))
    return path


def test_sites_of_other_accelerators_run_what_the_plan_writes(capsys, tmp_path):
    topology, best = unlike_sites(tmp_path, 1), tmp_path / "best.yaml"
    given = (CONFIG, *SMALL, "--topology", topology, "--rows", 3)
    out = printed(capsys, *given, "--output", best, "--pictures", tmp_path, "--explain", 1)
    assert "on 8 h100-sxm in east and 8 a100-sxm-80gb in west (unlike), " in out
    assert re.search(r" \d+\+\d+ sequences .* plan only *\n", out)
    row = re.search(r"plan only: .* row (\d) is the fastest that it runs\n", out)[1]
    assert re.search(rf"^{row} .* runs *$", out, re.MULTILINE)
    assert f"\n{best}: layout {row}, for geojax train {best}\n" in out
    assert RunConfig.load(best).dc.join == "islands"
    staged = tmp_path / "staged.yaml"
    out = printed(capsys, *given, "--roles", "stage", "--output", staged)
    assert re.search(r" \d\+\d layers ", out)
    assert sum(RunConfig.load(staged).pipeline.layers) == 4


def test_sites_of_other_numbers_are_planned_only(capsys, tmp_path):
    given = (CONFIG, *SMALL, "--topology", unlike_sites(tmp_path, 2, "h100-sxm"), "--rows", 2)
    out = printed(capsys, *given, "--trace", 1)
    assert "geojax train needs the same mesh" in out
    assert "1 hosts in each site (hosts: 1) would work\n" in out
    assert re.search(r"^without east: \S+ s \(.*\); row 1 [a-z ]+ \S+% of it$", out, re.MULTILINE)
    assert "\n1: not traced: geojax train cannot run it\n" in out
    line = refused(capsys, *given, "--output", tmp_path / "best.yaml")
    assert line.endswith("no layout of the table has; 1 hosts in each site (hosts: 1) would work")
    assert "--joins islands" in refused(capsys, *given, "--joins", "one_program")


@pytest.mark.parametrize(
    "layout",
    [
        LayoutCandidate.made(
            sequence_length=2048,
            microbatches=4,
            mesh={"dc": 2, "data": 8},
            zero={"stage": 3},
            communication={"overlap_grad_reduce": True},
        ),
        LayoutCandidate.made(
            sequence_length=2048,
            microbatches=4,
            mesh={"dc": 2, "data": 8},
            dc={"join": "islands"},
            zero={"stage": 2},
        ),
        LayoutCandidate.made(
            sequence_length=2048,
            microbatches=8,
            microbatch_size=2,
            mesh={"dc": 2, "stage": 2, "data": 2, "tensor": 2},
            dc={"role": "stage"},
            pipeline={
                "virtual_stages": 2,
                "layers": (5, 4, 4, 4, 4, 4, 4, 3),
                "schedule": "interleaved",
            },
            parallelism={"sequence": True},
            remat="full",
        ),
        LayoutCandidate.made(
            sequence_length=2048,
            microbatches=8,
            mesh={"dc": 2, "stage": 2, "data": 4},
            pipeline={"layers": (20, 12), "memory_limit": 2, "schedule": "1f1b"},
            communication={"gradient_compression": "int8"},
        ),
        LayoutCandidate.made(
            sequence_length=2048,
            mesh={"dc": 2, "data": 8},
            zero={"across_sites": True, "reshard_after_forward": False, "stage": 3},
        ),
    ],
    ids=str,
)
def test_a_layout_is_what_its_settings_make(layout, tmp_path):
    content = yaml.safe_load(CONFIG.read_text())
    content.pop("pipeline", None)
    content |= run_settings(layout)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    assert layout_of_run(RunConfig.load(path)) == layout
