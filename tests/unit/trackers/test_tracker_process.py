"""A tracker in a process of its own: whatever its library does, the run only gets a reason."""

import signal

import pytest

from geojax.trackers.tracker_process import TrackerError, TrackerProcess, check_class, log_line

pytestmark = pytest.mark.processes

FACTS = {
    "name": "run",
    "directory": "runs/run",
    "config": {"seed": 7},
    "version": "0.1.0",
    "step": 2,
    "id": "0" * 32,
    "site": "east",
}

BEGUN = f"start run {'0' * 32} 2 east 7"
"""Line of a start with these."""


@pytest.fixture
def made(tmp_path):
    """Make a process of a class in `support.observers`; none outlives the test."""
    processes = []

    def make(name, arguments, **times):
        output = tmp_path / "trackers" / "own.log"
        process = TrackerProcess(f"support.observers:{name}", arguments, output, **times)
        processes.append(process)
        return process

    yield make
    for process in processes:
        process.kill()


@pytest.fixture
def lines(tmp_path):
    return lambda: (tmp_path / "calls").read_text().splitlines()


def test_a_class_gets_the_run_its_numbers_and_its_end(tmp_path, made, lines, capfd):
    process = made("Recording", {"path": str(tmp_path / "calls")})
    process.start(FACTS)
    process.log(log_line(3, {"loss": 2.5, "mfu": float("inf")}))
    process.finish(130)
    assert process._process.returncode == 0
    assert lines() == [
        BEGUN,
        "3 {'loss': 2.5, 'mfu': inf}",
        "finish 130",
    ]
    assert (tmp_path / "trackers" / "own.log").read_text() == "begun\n"
    assert capfd.readouterr() == ("", "")


def test_what_a_library_raises_is_a_reason_and_the_next_step_is_logged(tmp_path, made, lines):
    process = made("Faulty", {"path": str(tmp_path / "calls")})
    process.start(FACTS)
    for fault, reason in (
        ("raise", "ValueError: no such metric"),
        ("exit", "SystemExit: the library ends"),
        ("interrupt", "KeyboardInterrupt"),
    ):
        with pytest.raises(TrackerError) as failure:
            process.log(log_line(3, {fault: 1.0}))
        assert str(failure.value) == reason
    for harmless in ("print", "signals"):
        process.log(log_line(4, {harmless: 1.0}))
    process.finish(0)
    assert [line.split()[0] for line in lines()] == ["start", "4", "4", "finish"]
    assert (tmp_path / "trackers" / "own.log").stat().st_size == 1 << 20


def test_a_process_that_ends_is_started_again_after_a_pause(tmp_path, made, lines):
    process = made("Faulty", {"path": str(tmp_path / "calls")}, restart_seconds=600)
    process.start(FACTS)
    with pytest.raises(TrackerError, match=r"its process has ended \(exit code 3\)"):
        process.log(log_line(1, {"die": 1.0}))
    with pytest.raises(TrackerError, match="has ended"):
        process.log(log_line(2, {"loss": 1.0}))
    assert lines() == [BEGUN], "none is started within the pause"
    process._may_start = 0.0
    process.log(log_line(3, {"loss": 1.0}))
    process.finish(0)
    assert [line.split()[0] for line in lines()] == ["start", "start", "3", "finish"]


@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_a_call_that_hangs_ends_the_process(made, method):
    process = made("HangingAt", {"method": method}, answer_seconds=0.05)
    calls = {
        "start": lambda: process.start(FACTS),
        "log": lambda: process.log(log_line(1, {})),
        "finish": lambda: process.finish(0),
    }
    for name, call in calls.items():
        process._answer_seconds = 0.05 if name == method else 60.0
        if name == method:
            with pytest.raises(TrackerError, match="no answer for 0 s, and its process is ended"):
                call()
            break
        call()
    assert process._process is None


def test_the_run_ends_a_process_that_hangs_and_starts_no_other(made):
    process = made("Recording", {"path": "/dev/null"})
    process.start(FACTS)
    child = process._process
    process.kill()
    assert child.returncode == -signal.SIGKILL
    with pytest.raises(TrackerError, match="has ended"):
        process.log(log_line(1, {}))
    process._may_start = 0.0
    with pytest.raises(TrackerError, match="the run has ended"):
        process.log(log_line(1, {}))


def test_a_record_is_finished_when_the_run_is_killed(tmp_path, made, lines):
    process = made("Recording", {"path": str(tmp_path / "calls")})
    process.start(FACTS)
    process._process.stdin.close()
    process._process.wait(60)
    assert lines()[-1] == "finish 1"


def test_a_class_that_is_no_tracker_is_told(made):
    process = made("Absent", {})
    with pytest.raises(TrackerError, match=r"LookupError: support.observers has no class Absent"):
        process.start(FACTS)
    process = made("Recording", {"folder": "x"})
    with pytest.raises(TrackerError, match="unexpected keyword argument 'folder'"):
        process.start(FACTS)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("support.observers:Recording", None),
        ("support.observers:WithoutFinish", "LookupError: WithoutFinish has no method finish"),
        ("support.absent:X", "ModuleNotFoundError: No module named 'support.absent'"),
    ],
)
def test_a_class_is_checked_without_an_import_into_the_run(name, reason):
    assert check_class(name) == reason
