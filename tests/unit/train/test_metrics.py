import contextlib
import errno
import json
import os
import shutil
import tracemalloc
from pathlib import Path

import pytest

from geojax.checkpoint import RunDirectory
from geojax.errors import UserError
from geojax.quantities import quantity
from geojax.train.metrics import MetricsWriter, read_metrics
from geojax.train.report import draw_loss_curve
from geojax.train.writing.background_writer import BackgroundWriter


@contextlib.contextmanager
def metrics_of(directory, step, report=print):
    with BackgroundWriter(directory.path, report) as files:
        yield MetricsWriter(directory, step, files)


def test_a_resumed_run_continues_the_file_and_each_step_stands_once(tmp_path):
    directory = RunDirectory(tmp_path)
    with metrics_of(directory, 0) as writer:
        for step in range(1, 6):
            writer.write(step, {"loss": float(step)})
    with directory.metrics.open("a") as file:
        file.write('{"step": 6, "lo')  # cut off by a kill
    with metrics_of(directory, 3) as writer:
        writer.write(4, {"loss": 40.0})
    lines = list(read_metrics(directory.metrics))
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    assert all(json.loads(text) for text in directory.metrics.read_text().splitlines())
    assert any(directory.tensorboard.iterdir())


def test_a_resumed_run_holds_none_of_the_lines_that_it_has_read(tmp_path):
    directory = RunDirectory(tmp_path)
    text = json.dumps({"step": 1, **{f"figure {number}": 0.1 for number in range(40)}}) + "\n"
    directory.metrics.write_text(20_000 * text)
    tracemalloc.start()
    with metrics_of(directory, 1):
        _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e6 < len(text) * 20_000
    assert directory.metrics.read_text() == 20_000 * text


def test_the_curve_is_drawn_from_what_is_there(tmp_path):
    directory = RunDirectory(tmp_path)
    with metrics_of(directory, 0) as writer:
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


@pytest.mark.parametrize(
    "line", [b"\x93NUMPY\x00\xff", b"null", b"[1]", b'{"step": null}', b"[" * 9999]
)
def test_a_file_that_holds_no_metrics_is_refused_in_one_line(tmp_path, line):
    directory = RunDirectory(tmp_path)
    directory.metrics.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:2: is no line of metrics") as refusal:
        MetricsWriter(directory, 2, BackgroundWriter(tmp_path, print))
    assert "\n" not in str(refusal.value)


def test_metrics_go_on_where_the_directory_was_made_again(tmp_path):
    with RunDirectory(tmp_path / "run").lock() as directory:
        with metrics_of(directory, 0) as writer:
            writer.write(1, {"loss": 3.0})
        with metrics_of(directory, 1) as writer:
            shutil.rmtree(directory.path)
            assert directory.make_again_if_removed()
            writer.open_again({"steps": 9})
            writer.write(2, {"loss": 2.0})
        assert list(read_metrics(directory.metrics)) == [{"step": 2, "loss": 2.0}]
        assert directory.config.read_text() == "steps: 9\n"
        assert any(directory.tensorboard.iterdir())


def failing(monkeypatch, error):
    """Let no file be opened to be written."""
    opened = Path.open

    def fail(path, mode="r", *arguments, **options):
        if mode.startswith("r"):
            return opened(path, mode, *arguments, **options)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("geojax.train.metrics.Path.open", fail)


def test_a_full_disk_at_the_start_is_a_warning_and_the_file_is_opened_later(tmp_path, monkeypatch):
    directory, lines = RunDirectory(tmp_path), []
    with metrics_of(directory, 0) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"loss": 9.0})
    with BackgroundWriter(tmp_path, lines.append) as files:
        with monkeypatch.context() as full:
            failing(full, errno.ENOSPC)
            writer = MetricsWriter(directory, 2, files)
            writer.write(3, {"loss": 3.0})
            files.__exit__()
        assert "No space left on device; writes lost so far: 1 of metrics.jsonl" in lines[0]
    with BackgroundWriter(tmp_path, lines.append) as files:
        writer._files = files
        writer.write(4, {"loss": 4.0})
    assert [line["step"] for line in read_metrics(directory.metrics)] == [1, 2, 4]


def test_a_folder_in_which_nobody_may_write_is_refused(tmp_path, monkeypatch):
    failing(monkeypatch, errno.EACCES)
    with pytest.raises(UserError, match=r"metrics cannot be written \(Permission denied\)"):
        MetricsWriter(RunDirectory(tmp_path), 0, BackgroundWriter(tmp_path, print))


def test_each_process_may_have_a_file_of_its_own(tmp_path):
    directory = RunDirectory(tmp_path)
    with BackgroundWriter(tmp_path, print) as files:
        for process in (0, 3):
            MetricsWriter(directory, 0, files, process=process, tensorboard=False).write(
                1, {"loss": process}
            )
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [{"step": 1, "loss": 0}]
    assert list(read_metrics(tmp_path / "metrics.process-3.jsonl")) == [{"step": 1, "loss": 3}]
