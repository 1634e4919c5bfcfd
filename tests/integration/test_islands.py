"""Sites that are jobs of their own: equal to one program, resumed, and ended with a lost site."""

import json
import shutil
import signal
import subprocess
import sys

import pytest
from support.island_jobs import SETTINGS, SITES, STAGES, start_sites
from support.small_runs import (
    assert_as_near,
    environment,
    finish,
    losses,
    remove_checkpoint,
    saved_steps,
    train,
    train_in_float64,
    wait_for_step,
    write_config,
)

from geojax.train.metrics import read_metrics


def launch(config, run, *options, timeline_step="null"):
    """Train with `geojax launch --islands` to the end."""
    line = [sys.executable, "-m", "geojax", "launch", "--islands", *options]
    settings = ["--run_directory", str(run), "--dc.timeline_step", timeline_step]
    return subprocess.run(
        [*line, "--", "train", str(config), *settings],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A config, and the folder of its run, which two jobs have trained."""
    folder = tmp_path_factory.mktemp("islands")
    config = write_config(folder / "run.yaml", corpus, **SETTINGS)
    sites = start_sites(config, "--dc.timeline_step", "4", "--sample.prompts", "[1 is]")
    ended = zip(sites, finish(*sites), SITES, SITES[::-1], strict=True)
    for process, output, site, other in ended:
        assert process.returncode == 0, output
        assert "step compiled      once" in output
        assert f"  {other} " in output, "a progress line has the link's figures"
        assert f"link to {other} " in output
        said = "no sample is written: that is for site east, which has the same" in output
        assert said == (site == "west")
    run = folder / "run"
    assert [site for site in SITES if (run / site / "sample.txt").exists()] == ["east"]
    return config, run


def test_two_jobs_train_as_one_program(trained, tmp_path, exact_losses):
    config, run = trained
    alone = tmp_path / "alone"
    arguments = (
        "--dc.join",
        "one_program",
        "--simulate_devices",
        "4",
        "--run_directory",
        str(alone),
    )
    made = train(config, *arguments)
    assert made.returncode == 0, made.stderr
    assert losses(run / "east") == losses(run / "west")
    wanted = losses(alone)
    assert sorted(wanted) == list(range(1, SETTINGS["steps"] + 1))
    assert_as_near(losses(run / "east"), wanted, exact_losses)


def test_each_site_shows_its_link_and_draws_a_step(trained):
    _, run = trained
    for site, other in zip(SITES, SITES[::-1], strict=True):
        steps = [each for each in read_metrics(run / site / "metrics.jsonl") if "loss" in each]
        for step in steps:
            assert step[f"link/{other}/sent_bytes"] == step[f"link/{other}/received_bytes"] > 0
            assert step[f"link/{other}/wait_seconds"] >= step[f"link/{other}/wait_seconds_bucket"]
        seen = [step for step in steps if f"site/{other}/step" in step]
        assert seen, "the other site has told its figures"
        of_other = losses(run / other)
        for step in seen:
            assert step[f"site/{other}/loss"] == of_other[int(step[f"site/{other}/step"])]
            assert step[f"site/{other}/age_seconds"] >= 0
        assert (run / site / "timeline.png").stat().st_size > 10_000
        events = json.loads((run / site / "timeline.json").read_text())["traceEvents"]
        assert {"Reduce 0", "Add 0", "Add scalars", "Apply"} <= {each["name"] for each in events}


def test_jobs_go_on_from_their_newest_common_checkpoint_with_the_same_bits(trained, tmp_path):
    config, run = trained
    assert saved_steps(run) == [3, 6]
    disks = [tmp_path / site for site in SITES]
    for disk, site in zip(disks, SITES, strict=True):
        for own in (site, f"checkpoints/{site}"):
            shutil.copytree(run / own, disk / own)
    remove_checkpoint(disks[1], 6)
    sites = start_sites(config, runs=disks)
    for process, output, disk, site in zip(sites, finish(*sites), disks, SITES, strict=True):
        assert process.returncode == 0, output
        assert (
            f"{disk}/checkpoints: step 6 is not whole (site west lacks it); restoring step 3 "
            "instead\n"
        ) in output
        assert losses(disk / site) == losses(run / site)


def test_a_part_that_is_damaged_at_one_site_is_read_from_the_other(trained, tmp_path):
    config, run = trained
    shutil.copytree(run, tmp_path / "run")
    remove_checkpoint(tmp_path / "run", 6)
    damaged = tmp_path / "run" / "checkpoints" / "east" / "3"
    largest = max(damaged.rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    sites = start_sites(config, runs=[tmp_path / "run"] * 2)
    for process, output, site in zip(sites, finish(*sites), SITES, strict=True):
        assert process.returncode == 0, output
        assert f"{damaged}: is damaged (" in output
        assert f"resuming from step 3 in {tmp_path}/run/{site}" in output
        assert losses(tmp_path / "run" / site) == losses(run / site)
    assert not [*tmp_path.rglob("*.damaged")]


@pytest.mark.parametrize("processes", [("2",), ("1", "2")], ids=["both", "one of them"])
def test_sites_of_two_processes_train_alike(processes, trained, tmp_path, exact_losses):
    config, run = trained
    made = launch(
        config, tmp_path / "run", "--processes-per-site", *processes, "--devices-per-process", "1"
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert losses(tmp_path / "run" / "east") == losses(tmp_path / "run" / "west")
    assert_as_near(losses(tmp_path / "run" / "west"), losses(run / "west"), exact_losses)
    for site, other in zip(SITES, SITES[::-1], strict=True):
        steps = list(read_metrics(tmp_path / "run" / site / "metrics.jsonl"))
        assert any(f"site/{other}/loss" in step for step in steps)


def test_one_program_goes_on_from_the_checkpoint_of_a_site(trained, tmp_path, exact_losses):
    config, run = trained
    shutil.copytree(run / "checkpoints" / "west", tmp_path / "run" / "checkpoints" / "west")
    remove_checkpoint(tmp_path / "run", 6)
    arguments = ("--dc.join", "one_program", "--simulate_devices", "4")
    made = train(config, *arguments, "--run_directory", str(tmp_path / "run"))
    assert made.returncode == 0, made.stderr
    assert "resuming from step 3" in made.stdout
    assert_as_near(losses(tmp_path / "run"), losses(run / "west"), exact_losses)


def test_a_lost_site_ends_the_run_and_is_named(corpus, tmp_path):
    settings = SETTINGS | {"steps": 100_000, "run_directory": str(tmp_path / "run")}
    east, west = start_sites(write_config(tmp_path / "run.yaml", corpus, **settings))
    try:
        wait_for_step(tmp_path / "run" / "west", 2, west)
    finally:
        west.send_signal(signal.SIGKILL)
        output, _ = finish(east, west)
    assert east.returncode == 1, output
    assert "site west" in output


TWO_IN_EACH = STAGES | {
    "mesh": {"dc": 2, "stage": 2},
    "model": {
        "num_hidden_layers": 4,
        "hidden_size": 36,
        "num_attention_heads": 2,
        "head_dim": 16,
        "intermediate_size": 52,
        "vocab_size": 301,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
    },
    "pipeline": {"schedule": "geopipe"},
}
"""Two stages in each site, and a table that the first and the last of them hold."""


@pytest.fixture(scope="module")
def stages(corpus, tmp_path_factory):
    """A config, and the folder of its run, which two sites have trained as stages."""
    folder = tmp_path_factory.mktemp("stages")
    config = write_config(folder / "run.yaml", corpus, **SETTINGS | TWO_IN_EACH)
    made = launch(config, folder / "run", "--devices-per-process", "2", timeline_step="15")
    assert made.returncode == 0, made.stdout + made.stderr
    return config, folder / "run"


@pytest.fixture(scope="module")
def exact_stages(corpus, tmp_path_factory):
    """The folder of the same run on one device in float64."""
    folder = tmp_path_factory.mktemp("stages-float64")
    return train_in_float64(folder, corpus, **SETTINGS | TWO_IN_EACH | {"checkpoint": {}})


def validation(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        value for line in lines for name, value in line.items() if name.startswith("validation/")
    ]


def test_stages_train_as_one_program_and_go_on_from_its_checkpoint(stages, exact_stages, tmp_path):
    config, run = stages
    alone = tmp_path / "alone"
    arguments = ("--dc.join", "one_program", "--simulate_devices", "4")
    made = train(config, *arguments, "--run_directory", str(alone))
    assert made.returncode == 0, made.stderr
    assert losses(run / "east") == losses(run / "west")
    wanted = losses(alone)
    assert sorted(wanted) == list(range(1, STAGES["steps"] + 1))
    exact = losses(exact_stages)
    assert_as_near(losses(run / "east"), wanted, exact)
    of_runs = (run / "east", alone, exact_stages)
    assert_as_near(*(dict(enumerate(validation(each))) for each in of_runs))
    assert len(validation(alone)) == 3
    remove_checkpoint(alone, 20)
    made = launch(config, alone, "--devices-per-process", "2")
    assert made.returncode == 0, made.stdout + made.stderr
    assert "resuming from step 10" in made.stdout
    assert_as_near(losses(alone / "west"), wanted, exact)


def check_timelines(run):
    """Each site has drawn the stages of all."""
    for site in SITES:
        assert (run / site / "timeline.png").stat().st_size > 10_000
        events = json.loads((run / site / "timeline.json").read_text())["traceEvents"]
        names = {each["args"]["name"] for each in events if each["name"] == "thread_name"}
        assert {f"site {other}.{stage}: devices" for other in SITES for stage in (0, 1)} <= names


def test_each_site_draws_the_stages_of_all(stages):
    check_timelines(stages[1])


def link_bytes(run, site, other):
    lines = list(read_metrics(run / site / "metrics.jsonl"))
    figures = [f"link/{other}/{way}_bytes" for way in ("sent", "received")]
    return {tuple(line[each] for each in figures) for line in lines if "loss" in line}


def test_a_process_for_each_stage_and_one_program_go_on_from_the_checkpoint_of_stages(
    stages, exact_stages, tmp_path
):
    config, run = stages
    again = tmp_path / "again"
    shutil.copytree(run, again, ignore=shutil.ignore_patterns("timeline.*"))
    assert saved_steps(again) == [10, 20]
    remove_checkpoint(again, 20)
    shutil.copytree(again, tmp_path / "alone")
    processes = ("--processes-per-site", "2", "--devices-per-process", "1")
    made = launch(config, again, *processes, timeline_step="5")
    assert made.returncode == 0, made.stdout + made.stderr
    assert "resuming from step 10" in made.stdout
    assert saved_steps(again) == [10, 20]
    for site, other in zip(SITES, SITES[::-1], strict=True):
        assert losses(again / site) == losses(run / site)
        assert validation(again / site) == validation(run / site)
        # Of both processes of a site, though the first one reports.
        assert link_bytes(again, site, other) == link_bytes(run, site, other)
    check_timelines(again)
    arguments = ("--dc.join", "one_program", "--simulate_devices", "4")
    made = train(config, *arguments, "--run_directory", str(tmp_path / "alone"))
    assert made.returncode == 0, made.stderr
    assert "resuming from step 10" in made.stdout
    assert_as_near(losses(tmp_path / "alone"), losses(run / "east"), losses(exact_stages))
