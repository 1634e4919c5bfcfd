"""`geojax plan --compile` as a person runs it, on a machine without GPUs."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from geojax.cli.main import run
from geojax.errors import UserError
from geojax.planner.compile_target import CompileTarget

QUICKSTART = str(Path(__file__).parents[3] / "configs" / "quickstart.yaml")
NEMOTRON = str(Path(__file__).parents[3] / "configs" / "nemotron4-340b-2x1536.yaml")
COMPILE = ("--compile", "--rows", "0")
TINY = ("--model", "tiny", "--batch.sequence_length", "256")


def test_the_compiled_step_beside_its_estimate(capsys, tmp_path):
    figures = tmp_path / "figures.json"
    assert run(["plan", QUICKSTART, *TINY, *COMPILE, "--json", str(figures)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"dc=2 x data=4 compiled for cpu:8 in \d+ s of this machine", out)
    assert re.search(r"^dc +all-reduce +\d+ +5\.77 MB ", out, re.MULTILINE)
    assert 0.9 < float(re.search(r"ratio (.*)$", out, re.MULTILINE)[1]) < 1.1
    written = json.loads(figures.read_text())["compiled"]
    assert written["target"] == "cpu:8"
    over_dc = [each for each in written["messages"] if each["axes"] == "dc"]
    assert sum(each["bytes_sent"] for each in over_dc) == pytest.approx(5770496, rel=1e-5)
    assert re.search(r"^sent over dc +5\.77 MB +5\.77 MB +1\.000", out, re.MULTILINE)
    assert written["product_flops"] == pytest.approx(written["planned"]["product_flops"], rel=0.01)
    assert written["planned"]["step_seconds"] is None
    assert "the plan has no times" in out
    assert written["memory_bytes"]["total"] > written["memory_bytes"]["temporaries"] > 0


def test_loops_over_tokens_of_experts_count_once_and_are_told(capsys, tmp_path):
    """Latent attention, experts and a first dense layer: blocks of tokens are data of the run."""
    model = (
        "{preset: tiny, num_hidden_layers: 2, hidden_size: 64, intermediate_size: 64, "
        "num_key_value_heads: 4, kv_lora_rank: 32, qk_nope_head_dim: 16, qk_rope_head_dim: 8, "
        "v_head_dim: 16, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 64, "
        "first_k_dense_replace: 1}"
    )
    figures = tmp_path / "figures.json"
    settings = ("--model", model, "--mesh", "{dc: 2, data: 2, expert: 2}")
    assert run(["plan", QUICKSTART, *settings, *COMPILE, "--json", str(figures)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"count once, so these figures are least ones: products with weights \(", out)
    compiled = json.loads(figures.read_text())["compiled"]
    assert compiled["product_loops_of_unknown_length"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.yaml",), "error: nowhere.yaml: no such file"),
        ((QUICKSTART, "--target", "h200:8"), "a target is h100:NUMBER or cpu:NUMBER"),
        ((QUICKSTART, "--target", "h100:"), "such as h100:3072"),
        ((QUICKSTART, "--target", "cpu:0"), "at least one device"),
        ((QUICKSTART, "--target", "cpu:65"), "at most 64 devices are simulated"),
        ((NEMOTRON, "--target", "h100:512"), "--target h100: XLA's compiler for GPUs is not inst"),
        ((NEMOTRON,), "install geojax-trainer[aot] (jax[cuda13]), which needs no GPU"),
    ],
)
def test_a_mistake_is_one_line(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run(["plan", *arguments, *COMPILE]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_target_has_as_many_devices_as_the_mesh():
    with pytest.raises(UserError, match="dc=2 x data=1536 makes 3072 devices, but there are 512"):
        CompileTarget.parse("h100:512").mesh({"dc": 2, "data": 1536}, None)


def test_sites_without_a_topology_are_equal():
    sites = CompileTarget.parse("h100:48").equal_sites(3).sites
    assert [(site.hosts, site.accelerators_per_host) for site in sites] == [(2, 8)] * 3
    assert [site.name for site in sites] == ["site0", "site1", "site2"]
    (site, _) = CompileTarget.parse("h100:8").equal_sites(2).sites
    assert (site.hosts, site.accelerators_per_host) == (1, 4)
