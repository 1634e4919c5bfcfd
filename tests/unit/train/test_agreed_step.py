"""The step of a run: resolved once, told to all, and kept for a resume of the same run."""

import jax
import pytest

from geojax.config.layout import Layout
from geojax.errors import MissingProcessesError, UserError
from geojax.step.resolved import Origin, RuntimeDevices, Step
from geojax.step.step_file import write_step
from geojax.train import agreed_step as module
from geojax.train.agreed_step import agreed_step, kept_or_resolved

DEVICES = RuntimeDevices(kind="cpu", count=8, processes=1)
ORIGIN = Origin(geojax="1", devices=(DEVICES,), topology=None, config={"steps": 3})
LAYOUT = Layout(batch={"global_batch_size": 8, "sequence_length": 8})
STEP = Step(layout=LAYOUT, origin=ORIGIN, notes=("one",))


@pytest.fixture
def as_process(monkeypatch):
    """Return a function that makes this process another of the same run."""
    notes = {}
    monkeypatch.setattr(module, "publish", lambda key, value: notes.update({key: value}))
    monkeypatch.setattr(module, "await_published", lambda key, timeout_seconds: notes.get(key))

    def become(process):
        monkeypatch.setattr(jax, "process_index", lambda: process)
        return notes

    return become


def refuse():
    raise UserError("layers do not divide")


def test_every_process_gets_the_step_that_process_0_resolves_once(as_process):
    resolved = []
    for process in range(3):
        as_process(process)
        step = agreed_step(lambda: resolved.append(1) or STEP, 1.0)
        assert step == STEP
    assert len(resolved) == 1


def test_a_step_that_cannot_be_ends_every_process_with_the_reason(as_process):
    for process in range(2):
        as_process(process)
        with pytest.raises(UserError, match="layers do not divide"):
            agreed_step(refuse, 1.0)


def test_process_0_is_named_where_it_says_nothing(as_process):
    as_process(1)
    with pytest.raises(MissingProcessesError, match="process 0"):
        agreed_step(refuse, 1.0)


def test_a_message_is_a_small_part_of_the_step(as_process):
    notes = as_process(0)
    long = STEP.model_copy(update={"notes": ("a line that is told again",) * 1000})
    agreed_step(lambda: long, 1.0)
    assert len(notes["step"]) < len(long.model_dump_json()) / 10


def test_the_same_run_takes_the_step_of_the_file(tmp_path):
    path = tmp_path / "step.yaml"
    assert kept_or_resolved(path, ORIGIN, lambda: STEP).is_new
    write_step(STEP, path)
    kept = kept_or_resolved(path, ORIGIN, refuse)
    assert (kept.step, kept.is_new) == (STEP, False)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"geojax": "2"}, "geojax"),
        ({"devices": (DEVICES, DEVICES)}, "devices"),
        ({"topology": {"name": "two"}}, "topology, topology.name"),
        ({"config": {"steps": 4}}, "steps"),
    ],
)
def test_another_run_resolves_anew_and_names_what_differs(tmp_path, changes, named):
    path = tmp_path / "step.yaml"
    write_step(STEP, path)
    anew = STEP.model_copy(update={"notes": ()})
    kept = kept_or_resolved(path, ORIGIN.model_copy(update=changes), lambda: anew)
    assert (kept.step, kept.is_new, kept.replaces) == (anew, True, named)
