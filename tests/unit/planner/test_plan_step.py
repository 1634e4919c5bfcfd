"""The sections of `geojax plan CONFIG` on the config's own step, as a person reads them."""

import json
import re
from pathlib import Path

import jax
import pytest

from geojax.cli.main import run
from geojax.cli.plan_step import OwnStep
from geojax.errors import UserError

QUICKSTART = str(Path(__file__).parents[3] / "configs" / "quickstart.yaml")

H100_CONFIG = str(Path(__file__).parents[3] / "configs" / "llama3-8b-2x8.yaml")

H100_SITES = """
sites:
  - {name: east, hosts: 1, accelerators_per_host: 4, accelerator: h100-sxm}
  - {name: west, hosts: 1, accelerators_per_host: 4, accelerator: h100-sxm}
"""


def printed(capsys, *arguments):
    assert run(["plan", *arguments, "--rows", "0"]) == 0
    return capsys.readouterr().out


def test_the_table_names_the_uses_of_memory(capsys):
    out = printed(capsys, QUICKSTART, "--model", "tiny", "--batch.sequence_length", "256")
    assert "\ndc=2 x data=4, ZeRO 1, remat none, fp32\n" in out
    for kind in ("master weights", "optimizer moments", "gathered weights", "gradients", "total"):
        assert f"\n{kind} " in out
    assert re.search(r"^fits on a100-sxm-40gb, .*ascend-910b$", out, re.MULTILINE), "of no topology"
    assert re.search(r"^dc +5\.77 MB$", out, re.MULTILINE), "4 bytes for each of a quarter"
    assert "over dc: 23.1 MB a step, site and direction" in out
    assert "zero.across_sites false: " in out
    assert "zero.across_sites true: " in out


def test_what_is_not_known_is_said_in_its_line(capsys):
    out = printed(capsys, QUICKSTART)
    assert "How long is a step, and why?\nnot known: nothing is known of the float32 peak" in out
    out = printed(capsys, QUICKSTART, "--topology", "null", "--mesh.dc", "1")
    assert "\nnot known: there is no topology; add one, such as --topology two-h100-sites\n" in out
    assert re.search(r"^data +\S+ MB$", out, re.MULTILINE)


def test_a_ramp_is_a_line_with_the_times_of_its_ends(capsys):
    ramp = "{start: 32, increment: 32, sequences: 1000}"
    batch = f"{{global_batch_size: 128, sequence_length: 8192, microbatches: 8, ramp: {ramp}}}"
    out = printed(capsys, H100_CONFIG, "--model.num_hidden_layers", "4", "--batch", batch)
    line = re.search(r"^batch.ramp: .*", out, re.MULTILINE).group()
    expected = r"batch.ramp: of the full batch, which comes after (\d+) steps; steps of 32 to 96 "
    steps, first, last = re.fullmatch(expected + r"sequences take (\S+) to (\S+) s", line).groups()
    assert int(steps) == 11 + 5 + 4
    whole = float(re.search(r"and why\?\n(\S+) s", out).group(1))
    assert 0 < float(first) < float(last) < whole


def test_a_schedule_that_refuses_a_size_of_the_ramp_names_it(capsys):
    stages = ("--mesh.stage=4", "--mesh.data=1", "--model.num_hidden_layers=8")
    schedule = "--pipeline={schedule: interleaved, virtual_stages: 2}"
    batch = (
        "--batch={global_batch_size: 64, sequence_length: 64, microbatches: 8, "
        "ramp: {start: 16, increment: 16, sequences: 100}}"
    )
    assert run(["plan", QUICKSTART, *stages, schedule, batch, "--rows", "0"]) == 2
    message = capsys.readouterr().err
    assert "batch.ramp: a batch of 16 sequences has 2 microbatches in a pipeline: 2" in message
    assert message.endswith("take 4 at least\n")


def test_times_are_named_by_their_source(capsys, tmp_path):
    figures = tmp_path / "figures.json"
    out = printed(capsys, H100_CONFIG, "--model.num_hidden_layers", "4", "--json", str(figures))
    line, terms, tokens, error = re.search(r"and why\?\n(.*)\n(.*)\n(.*)\n(.*)\n", out).groups()
    assert re.fullmatch(r"\S+ s ±\d+% by the cost model, \S+% MFU", line)
    assert terms.startswith("made of matrix products ")
    assert re.fullmatch(r"\S+ tokens a step, \S+ a day", tokens)
    assert error.endswith("error that 90% of published steps of them keep within")
    assert "\ngeojax train will log:\n  " in out
    written = json.loads(figures.read_text())
    assert written["step"]["seconds"] == pytest.approx(float(line.split()[0]), rel=1e-3)
    exposed = sum(term["exposed_seconds"] for term in written["step"]["terms"])
    assert exposed == pytest.approx(written["step"]["seconds"])
    assert written["memory"]["bytes"] == sum(written["memory"]["by_use"].values())
    assert written["sent_bytes"]["dc"] > 0


@pytest.mark.parametrize(
    ("model", "verdict"),
    [
        ("tiny", "\nfits: a step needs about "),
        ("llama3-70b", "\ndoes not fit: a step needs about "),
    ],
)
def test_it_says_whether_the_step_fits(capsys, tmp_path, model, verdict):
    topology = tmp_path / "sites.yaml"
    topology.write_text(H100_SITES)
    machine = ("--simulate-devices", "null", "--topology", str(topology))
    options = ("--precision", "bf16", "--communication.bucket-bytes", "null")
    out = printed(capsys, QUICKSTART, "--model", model, *machine, *options)
    assert verdict in out
    assert "72 GB of an h100-sxm's 80 GB are usable" in out
    assert ("more devices" in out) == (model == "llama3-70b"), "nothing else is enough"


def test_a_site_with_its_own_runtime_is_judged_by_its_own_programs(capsys, tmp_path):
    topology = tmp_path / "sites.yaml"
    topology.write_text(H100_SITES)
    machine = ("--simulate-devices", "null", "--topology", str(topology), "--dc.join", "islands")
    batch = ("--batch.global-batch-size", "16", "--batch.microbatches", "2")
    out = printed(capsys, QUICKSTART, "--model", "tiny", *machine, *batch)
    assert "2 sites with runtimes of their own, each: 5.77M parameters, data=4, ZeRO 1" in out
    for kind in ("gathered weights", "gradients", "activations", "communication", "total"):
        assert f"\n{kind} " in out
    assert "\nfits: a step needs about " in out
    assert "over dc: 23.1 MB a step from a site to each other, in 4 buckets" in out
    assert "activations: of 2 of 2 microbatches at once" in out
    assert re.search(r"transport: at most 12\.\d MB of a device are offered", out)
    assert "(communication), and on GPUs as much of host memory" in out


def test_of_stages_with_runtimes_of_their_own_the_largest_is_judged(capsys):
    stages = ("--mesh", "{dc: 2, stage: 2, data: 2}", "--pipeline.schedule", "1f1b")
    own = ("--dc.join", "islands", "--dc.role", "stage", "--batch.microbatches", "4")
    out = printed(capsys, QUICKSTART, *stages, *own)
    assert (
        "own, the stage of 4 that needs most, with 1 of 4 layers: 2.41M parameters, data=2" in out
    )
    # One sequence of 128 tokens of 192 numbers on each of two ranks.
    assert "over dc: 197 kB a microbatch from a stage to the next, and as much back" in out
    assert "activations: of 4 of 4 microbatches at once" in out
    # The hops of four microbatches, 98 kB each, half of a tied table of 4,096 x 192, and a MiB.
    assert "transport: at most 3.01 MB of a device are offered to each other stage" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.yaml",), "error: nowhere.yaml: no such file"),
        ((QUICKSTART, "--zero.stag", "3"), "did you mean 'stage'?"),
        ((QUICKSTART, "--mesh.tensor", "3"), "tensor can be 1, 2 or 4"),
        ((QUICKSTART, "--topology", "simulated-4x2"), "dc must be 4"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, message):
    assert run(["plan", *arguments, "--rows", "0"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_accelerators_are_asked_only_if_the_step_is_for_those_of_this_machine(monkeypatch):
    seen = []

    def trace(config):
        seen.append(jax.config.jax_platforms)
        raise UserError("far enough")

    monkeypatch.setattr(OwnStep, "of", trace)
    platforms = jax.config.jax_platforms
    undescribed = ("--topology", "null", "--simulate-devices", "null")
    for arguments in ((H100_CONFIG,), (QUICKSTART,), (QUICKSTART, *undescribed)):
        jax.config.update("jax_platforms", None)
        run(["plan", *arguments, "--rows", "0"])
    jax.config.update("jax_platforms", platforms)
    assert seen == ["cpu", "cpu", None]
