"""What `benchmarks/wan.py` does without a link: who takes part, what counts, what goes on."""

import importlib
import io
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from geojax.errors import UserError
from geojax.models import ModelConfig, parameter_count
from geojax.transport import MessageKey, loopback
from geojax.wan import WanSettings

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield lambda name: importlib.import_module(name)
    for name in [name for name in sys.modules if name == "wan" or name.startswith("wan_sides")]:
        del sys.modules[name]


def cell_of(name, losses=(7.0, 6.5), **values):
    numbers = {
        "tokens_per_second": 10.0,
        "tokens_per_second_unshaped": 20.0,
        "efficiency": 0.5,
        "sent_bytes_per_step": [1e6, 1e6],
        "counted_over_formula": 1.0,
    }
    cell = {"name": name, "variant": "", "role": "data", "rounded": False}
    return cell | numbers | {"losses": list(losses)} | values


def test_what_is_trained_is_what_geojax_counts(benchmark):
    work = benchmark("wan_sides.work")
    assert work.parameter_count() == parameter_count(ModelConfig(**work.MODEL))
    assert work.ROWS % work.MICROBATCHES == 0
    assert sum(work.layers_of_chunks(4)) == work.MODEL["num_hidden_layers"]


def test_every_geojax_contestant_is_a_run(benchmark):
    side = benchmark("wan_sides.geojax_side")
    module = benchmark("wan_sides.contestants")
    long = [*module.long_steps(), *module.long_pipelines(2), *module.long_pipelines(6)]
    long += module.deep_pipelines()
    everyone = [*module.contestants(), *long]
    assert len({str(each) for each in everyone}) == len(everyone)
    for each in everyone:
        if each.side in ("geojax_side", "islands_side"):
            run = side.run_config(each.settings, each.repeats)
            assert run.dc.role == each.role
            assert run.batch.global_batch_size == each.repeats * benchmark("wan_sides.work").ROWS


def test_quick_runs_have_fewer_variants_and_only_names_some(benchmark):
    everyone = benchmark("wan_sides.contestants").contestants()
    chosen = benchmark("wan").chosen
    quick = chosen(everyone, quick=True, only=[])
    assert {each.side for each in quick} == {each.side for each in everyone}
    assert len(quick) < len(chosen(everyone, quick=False, only=[])) == len(everyone)
    assert [each.name for each in chosen(everyone, quick=True, only=["GPipe"])] == ["PyTorch GPipe"]
    with pytest.raises(UserError, match=r"--only nobody: .*PyTorch GPipe"):
        chosen(everyone, quick=False, only=["nobody"])


def test_a_record_goes_on_where_it_ended_and_knows_other_losses(benchmark, monkeypatch, tmp_path):
    record_of, path = benchmark("wan_sides.record").Record, tmp_path / "wan.json"
    first, second = benchmark("wan_sides.contestants").contestants()[:2]
    monkeypatch.setattr(sys, "argv", ["wan.py", "--quick"])
    record_of(path, {"steps": 2}).add("a link", first, cell_of(first.name))
    monkeypatch.setattr(sys, "argv", ["wan.py"])
    record = record_of(path, {"steps": 2})
    assert record.missing("a link", [first, second]) == [second]
    assert record.missing("another", [first]) == [first]
    record.add("a link", second, cell_of(second.name))
    record.add("another", first, cell_of(first.name))
    assert json.loads(path.read_text())["commands"] == ["python wan.py --quick", "python wan.py"]
    assert list(record.ordered(["another", "none", "a link"], [first, second])) == [
        "another",
        "a link",
    ]
    in_order = record.ordered(["a link"], [second, first])["a link"]
    assert [cell["variant"] for cell in in_order] == [second.variant, first.variant]
    assert record.disagreement(second, [7.00005, 6.5]) is None
    assert "[7.0, 6.6] are not those of" in record.disagreement(second, [7.0, 6.6])
    with pytest.raises(UserError, match="measured otherwise"):
        record_of(path, {"steps": 3})


def test_the_fastest_variant_is_shown_and_drawn(benchmark, tmp_path):
    report = benchmark("wan_sides.report")
    cells = [
        cell_of("PyTorch DDP", variant="5 MB buckets"),
        cell_of("geojax gpipe", role="stage"),
        cell_of("PyTorch DDP", variant="25 MB buckets", tokens_per_second=12.0),
    ]
    best = report.fastest(cells)
    assert [cell["variant"] for cell in best] == ["25 MB buckets", ""]
    best[1]["processor_seconds_per_step"] = {"plain": [1.25, 1.11], "link": [1.3, 1.2]}
    best[0][report.RELAY] = 0.163
    shown = report.table("a link", best)
    assert shown.row_count == 2
    (of_relay,) = (column for column in shown.columns if "relay" in str(column.header))
    assert list(of_relay.cells) == ["0.16", ""]
    (of_processor,) = (column for column in shown.columns if "CPU" in str(column.header))
    assert list(of_processor.cells) == ["", "1.11"]
    of_sites = [[{"bucket": 0.5, "scalars": 0.25}, {"bucket": 0.25}], [{"bucket": 0.75}, {}]]
    assert report.waited_seconds({"wait_seconds_of_sites": {"link": of_sites}}) == 0.375
    assert report.waited_seconds(best[0]) is None
    report.draw({"a link": cells}, tmp_path / "wan.png")
    assert (tmp_path / "wan.png").stat().st_size > 1000


def test_a_long_name_is_wrapped_and_no_number_is_cut(benchmark):
    report = benchmark("wan_sides.report")
    written = io.StringIO()
    of_long_name = cell_of("geojax " + "which has a long name " * 6)
    Console(file=written, width=150).print(report.table("a link", [of_long_name]))
    assert "tokens/s   unshaped   ciency" in written.getvalue()
    assert "…" not in written.getvalue()


def test_the_bound_of_an_order_of_messages(benchmark):
    bound = benchmark("wan_sides.bound")
    rate = 1500 / 1448 * 1e6  # a megabyte of payload a second
    link = WanSettings(round_trip_seconds=0.2, bytes_per_second=rate)
    early = [bound.Departure(1.0, 1e6), bound.Departure(3.0, 0.0)]
    assert bound.efficiency_bound(4.0, early, link) == pytest.approx(4.0 / 4.1)  # half a round trip
    behind = [bound.Departure(1.0, 1e6), bound.Departure(1.5, 1e6)]
    assert bound.efficiency_bound(4.0, behind, link) == pytest.approx(4.0 / 5.6)
    assert bound.efficiency_bound(4.0, behind, WanSettings()) == 1.0


def test_the_bound_of_a_pipeline(benchmark):
    bound = benchmark("wan_sides.bound")
    link = WanSettings(round_trip_seconds=0.2, bytes_per_second=1500 / 1448 * 1e6)
    # A hop takes 0.1 + 0.5 s; there and back, and half a round trip for the scalars.
    assert bound.pipeline_bound(4.0, 0.5e6, link) == pytest.approx(4.0 / 5.3)
    assert bound.pipeline_bound(4.0, 0.5e6, WanSettings()) == 1.0


def test_a_blocking_receive_asks_when_its_result_is_needed(benchmark, monkeypatch):
    east, west = loopback(2)
    asked = []
    begin = west.fetch
    monkeypatch.setattr(west, "fetch", lambda *message: asked.append(message) or begin(*message))
    blocking = benchmark("wan_sides.blocking").BlockingReceives(west)
    sent = jnp.arange(3.0)
    key = MessageKey(1, "activation")
    fetch = blocking.fetch(
        0, key, [jax.ShapeDtypeStruct(sent.shape, sent.dtype, sharding=sent.sharding)]
    )
    east.offer(1, key, [sent])
    assert not fetch.wait(0.0)
    assert not fetch.arrived()
    assert not asked
    (arrived,) = fetch.result()
    assert len(asked) == 1
    assert fetch.arrival is not None
    assert arrived.tolist() == [0.0, 1.0, 2.0]
    assert blocking.site == 1
