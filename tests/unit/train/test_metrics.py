import json

from geojax.checkpoint import RunDirectory
from geojax.quantities import quantity
from geojax.train.metrics import MetricsWriter, read_metrics
from geojax.train.report import draw_loss_curve


def test_a_resumed_run_continues_the_file_and_each_step_stands_once(tmp_path):
    directory = RunDirectory(tmp_path)
    with MetricsWriter(directory, 0) as writer:
        for step in range(1, 6):
            writer.write(step, {"loss": float(step)})
    with directory.metrics.open("a") as file:
        file.write('{"step": 6, "lo')  # cut off by a kill
    with MetricsWriter(directory, 3) as writer:
        writer.write(4, {"loss": 40.0})
    lines = read_metrics(directory.metrics)
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    assert all(json.loads(text) for text in directory.metrics.read_text().splitlines())
    assert any(directory.tensorboard.iterdir())


def test_the_curve_is_drawn_from_what_is_there(tmp_path):
    directory = RunDirectory(tmp_path)
    with MetricsWriter(directory, 0) as writer:
        writer.write(0, {"validation/a": 3.0})
        for step in range(1, 6):
            writer.write(step, {"loss": 3.0 / step})
        writer.write(5, {"validation/a": 0.7})
    draw_loss_curve(directory.metrics, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_quantities_read_at_a_glance():
    assert quantity(5_247_232) == "5.25M"
    assert quantity(20_984_896, "B") == "21 MB"
    assert quantity(12, "B") == "12 B"
