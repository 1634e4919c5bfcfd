"""Runs of small Python programs: what is shown, who is blamed, that nothing is left."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import PATIENCE_SECONDS, is_running, wait_until

from geojax.job.exit_messages import ending_because, lost_contact
from geojax.launch import Output, local_workers, supervise, supervise_sites
from geojax.launch.workers import Worker

# Lets a program wait for another: a file appears.
PRELUDE = """
import os, pathlib, signal, subprocess, sys, time
folder, site = pathlib.Path(sys.argv[1]), os.environ["GEOJAX_SITE"]
def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)
def alive(name="alive"):
    (folder / f"{name}-{os.getpid()}").touch()
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a program in sites a, b (and c); gives the outcome and what was printed."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    def run(program, sites="ab", grace=5.0, settle=0.3):
        command = [sys.executable, "-S", "-c", PRELUDE + program, str(tmp_path)]
        workers = local_workers(
            list(sites), (1,) * len(sites), command, simulated_devices=None, grace_seconds=grace
        )
        out, err = io.StringIO(), io.StringIO()
        output = Output(workers, out, err)
        outcome = supervise(workers, output, grace_seconds=grace, settle_seconds=settle)
        nothing_is_left(tmp_path)
        return outcome, out.getvalue().splitlines(), err.getvalue().splitlines()

    return run


def nothing_is_left(folder: Path) -> None:
    """No process that called alive() lives."""
    for mark in folder.glob("*-*"):
        process = int(mark.name.rpartition("-")[2])
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def ended(outcome):
    """The exit code and who is blamed."""
    return outcome.exit_code, [worker.label for worker in outcome.blamed]


def test_lines_are_marked_and_streams_kept_apart(run):
    outcome, out, err = run(
        """
print(site, "of", os.environ["GEOJAX_PROCESS_COUNT"], "is", os.environ["GEOJAX_PROCESS_ID"])
print("problem", file=sys.stderr)
print("progress 1\\rprogress 2\\nno end", end="")
"""
    )
    assert (outcome.exit_code, outcome.blamed) == (0, ())
    assert [line for line in out if line.startswith("b")] == [
        "b/1 | b of 2 is 1",
        "b/1 | progress 2",
        "b/1 | no end",
    ]
    assert sorted(err) == ["a/0 | problem", "b/1 | problem"]


def test_when_one_fails_all_end_and_it_is_named(run):
    outcome, _, err = run(
        """
alive()
if site == "b":
    sys.exit("my disk is empty")
time.sleep(60)
"""
    )
    assert ended(outcome) == (1, ["b/1"])
    assert "b/1 | my disk is empty" in err


@pytest.mark.parametrize("seconds", [0, 60], ids=["ends", "goes on"])
def test_a_bad_verdict_is_nobodys_fault(run, seconds):
    outcome, out, err = run(
        f"""
alive()
if site == "a":
    wait_for("done")
    sys.exit(3)
print("done", flush=True)
(folder / "done").touch()
time.sleep({seconds})
"""
    )
    assert ended(outcome) == (3, [])
    assert not outcome.failed
    assert (out, err) == (["b/1 | done"], [])


def test_a_failure_counts_for_more_than_a_bad_verdict(run):
    outcome, _, _ = run(
        """
if site == "a":
    wait_for("failing")
    sys.exit(3)
(folder / "failing").touch()
sys.exit(1)
""",
        settle=PATIENCE_SECONDS,
    )
    assert ended(outcome) == (1, ["b/1"])
    assert outcome.failed


def test_a_killed_process_has_the_exit_code_of_a_shell(run):
    outcome, _, _ = run(
        """
if site == "a":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    )
    assert ended(outcome) == (137, ["a/0"])


def test_whoever_ignores_sigterm_is_killed_with_its_children(run):
    outcome, out, _ = run(
        """
signal.signal(signal.SIGTERM, lambda *_: print("not me", flush=True))
alive()
if site == "a":
    wait_for("ready")
    sys.exit(4)
# One child in the group, and one that left it and lost its parent.
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
late = "import os, time; os.setsid(); os.fork() and os._exit(0); "
late += f"open(r'{folder}/late-' + str(os.getpid()), 'w'); open(r'{folder}/ready', 'w'); "
subprocess.run([sys.executable, "-S", "-c", late + "time.sleep(600)"], stdout=-3, stderr=-3)
while True:
    time.sleep(1)
""",
        grace=2.0,
    )
    assert ended(outcome) == (4, ["a/0"])
    assert "b/1 | not me" in out


@pytest.mark.parametrize(
    "words",
    [ending_because("process 0 (site a, host n1)", "my disk is empty"), lost_contact(" (closed)")],
)
def test_who_only_followed_is_not_blamed(run, words):
    outcome, _, _ = run(
        f"""
if site == "a":  # as process 0, which tells the others and ends last
    wait_for("told")
    time.sleep(0.1)
    sys.exit(4)
print({words!r}, file=sys.stderr)
(folder / "told").touch()
sys.exit(1)
""",
        settle=PATIENCE_SECONDS,
    )
    assert ended(outcome) == (4, ["a/0"])


def test_where_nobody_knows_who_went_away_the_one_that_noticed_is_named(run):
    noticed = lost_contact(" (nobody is at the other end)")
    outcome, _, _ = run(
        f"""
if site == "a":  # as process 0, which tells the others and ends last
    print({noticed!r}, file=sys.stderr)
    wait_for("told")
    time.sleep(0.1)
    sys.exit(1)
print({ending_because("process 0 (site a, host n1)", noticed)!r}, file=sys.stderr)
(folder / "told").touch()
sys.exit(1)
""",
        settle=PATIENCE_SECONDS,
    )
    assert ended(outcome) == (1, ["a/0"])


def test_who_was_stuck_is_blamed_with_the_exit_code_of_who_noticed(run):
    words = lost_contact(": process 1 (site b, host n1) sent no heartbeat for 40 seconds")
    outcome, _, _ = run(
        f"""
alive()
if site == "a":
    wait_for("stuck")
    print({words!r}, file=sys.stderr)
    sys.exit(1)
(folder / "stuck").touch()
os.kill(os.getpid(), signal.SIGSTOP)
""",
        grace=0.3,
    )
    assert ended(outcome) == (1, ["b/1"])
    assert outcome.stuck


def test_who_lost_contact_with_each_other_are_blamed_together(run):
    """The first and the last of three cannot reach each other; the second one hears of it."""
    words = {
        "a": f"error: {lost_contact(': process 2 (site c, host n2) sent no heartbeat')}",
        "b": ending_because("process 0 (site a, host n1)", lost_contact(": process 2 (site c)")),
        "c": lost_contact(": process 0 (site a, host n1), which coordinates the run, is gone"),
    }
    outcome, _, _ = run(
        f"""
print({words!r}[site], file=sys.stderr)
(folder / site).touch()
wait_for("a"), wait_for("b"), wait_for("c")
time.sleep(60 if site == "c" else 0)  # beyond the time to settle
sys.exit(1)
""",
        sites="abc",
    )
    assert ended(outcome) == (1, ["a/0", "c/2"])
    assert not outcome.stuck


def test_ctrl_c_is_passed_on_and_all_may_take_their_time(run):
    outcome, out, err = run(
        f"""
def save(*_):
    time.sleep(0.5)
    print("saved")
    sys.exit(130)
signal.signal(signal.SIGINT, save)
(folder / site).touch()
wait_for("a"), wait_for("b")
if site == "a":
    os.kill({os.getpid()}, signal.SIGINT)
time.sleep(60)
"""
    )
    assert (outcome.exit_code, outcome.stopped_by) == (130, signal.SIGINT)
    assert sorted(out) == ["a/0 | saved", "b/1 | saved"]
    assert err[0].startswith("geojax launch: SIGINT: all processes finish their step and save")


def test_the_second_ctrl_c_ends_at_once(run):
    outcome, _, err = run(
        f"""
signal.signal(signal.SIGINT, lambda *_: (folder / "heard").touch())
alive()
(folder / site).touch()
wait_for("a"), wait_for("b")
if site == "a":
    os.kill({os.getpid()}, signal.SIGINT)
    wait_for("heard")  # two at once would be one
    os.kill({os.getpid()}, signal.SIGINT)
while True:
    time.sleep(60)
"""
    )
    assert (outcome.exit_code, outcome.stopped_by) == (137, signal.SIGINT)
    assert any("SIGINT again" in line for line in err)


def test_handlers_of_signals_are_put_back(run):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run("")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_reader_that_goes_away_stops_the_run():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    command = [sys.executable, "-S", "-u", "-c", "while True: print('line')"]
    workers = local_workers(["a"], (1,), command, simulated_devices=1, grace_seconds=5)
    outcome = supervise(workers, Output(workers, Closed(), io.StringIO()), grace_seconds=5)
    assert (outcome.exit_code, outcome.stopped_by) == (143, signal.SIGHUP)


def test_a_program_that_is_not_there_is_said(run, tmp_path):
    workers = local_workers(
        ["a"], (1,), [str(tmp_path / "none")], simulated_devices=2, grace_seconds=5
    )
    err = io.StringIO()
    outcome = supervise(workers, Output(workers, err, err), grace_seconds=5)
    assert outcome.exit_code == 127
    assert "none: cannot be started (No such file or directory)" in err.getvalue()


def test_colours_are_for_terminals(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    worker = Worker(0, "a", (), {})
    out, err = Terminal(), io.StringIO()
    monkeypatch.delenv("NO_COLOR", raising=False)
    output = Output([worker], out, err)
    output.line(worker, "text", error=False)
    output.line(worker, "text", error=True)
    assert out.getvalue() == "\033[36ma/0 |\033[0m text\n"
    assert err.getvalue() == "a/0 | text\n"


def test_a_launcher_that_is_killed_leaves_nobody_behind(tmp_path):
    """Not even a worker that ignores SIGTERM, its child, and a daemon in a session of its own."""
    program = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    alive("daemon")
elif not os.fork():
    alive("child")
else:
    alive()
while True:
    time.sleep(60)
"""
    launcher = f"""
import sys
from geojax.launch import Output, local_workers, supervise, supervise_sites
command = [sys.executable, "-S", "-c", {PRELUDE + program!r}, {str(tmp_path)!r}]
workers = local_workers(["a", "b"], (1, 1), command, simulated_devices=1, grace_seconds=0.2)
supervise(workers, Output(workers, sys.stdout, sys.stderr), grace_seconds=60)
"""
    process = subprocess.Popen([sys.executable, "-c", launcher])
    wait_until(lambda: len(list(tmp_path.glob("*-*"))) == 6)
    process.kill()
    process.wait()
    processes = [int(mark.name.rpartition("-")[2]) for mark in tmp_path.glob("*-*")]
    wait_until(lambda: not any(is_running(process) for process in processes))


LOST = "transport: lost the connection to site {0} (process 0, host n1); restart"
SILENT = "transport: site {0} (process 0, host n1) has been silent for 5 seconds; restart"


@pytest.mark.parametrize("words", [LOST, SILENT])
def test_a_site_that_is_a_job_of_its_own_is_blamed_by_the_others(run, words):
    outcome, _, _ = run(
        f"""
if site == "b":
    time.sleep(60)
print({words.format("b")!r}, file=sys.stderr)
sys.exit(1)
"""
    )
    assert ended(outcome) == (1, ["b/1"])


def test_sites_that_are_jobs_and_blame_each_other_are_both_named(run):
    outcome, _, _ = run(
        f"""
print({SILENT!r}.format("ba"["ab".index(site)]), file=sys.stderr)
sys.exit(1)
""",
        settle=PATIENCE_SECONDS,
    )
    assert ended(outcome) == (1, ["a/0", "b/1"])


@pytest.fixture
def run_sites(tmp_path, monkeypatch):
    """Runs a program in sites a and b by themselves; gives exit codes and the launcher's lines."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr("geojax.launch.restart_policy.FIRST_DELAY", 0.01)

    def run_sites(program, limit=5):
        command = [sys.executable, "-S", "-c", PRELUDE + program, str(tmp_path)]
        workers = local_workers(
            ["a", "b"], (1, 1), command, simulated_devices=None, grace_seconds=5
        )
        err = io.StringIO()
        output = Output(workers, io.StringIO(), err)
        sites = [[worker] for worker in workers]
        outcomes = supervise_sites(sites, output, limit=limit, grace_seconds=5, settle_seconds=0.3)
        nothing_is_left(tmp_path)
        lines = [line for line in err.getvalue().splitlines() if line.startswith("geojax launch")]
        return [outcome.exit_code for outcome in outcomes], lines

    return run_sites


def test_a_site_that_fails_starts_again_and_the_other_goes_on(run_sites):
    codes, lines = run_sites(
        """
alive()
if site == "b":
    starts = len(list(folder.glob("start*")))
    (folder / f"start{starts}").touch()
    if starts < 2:
        sys.exit(1)
    print("step 1/1  loss 1", flush=True)
    (folder / "whole").touch()
if site == "a":
    (folder / "once").touch(exist_ok=False)
wait_for("whole")
"""
    )
    assert codes == [0, 0]
    again = "geojax launch: site b failed, exit code 1; it starts again in"
    assert lines == [f"{again} 0.01 s", f"{again} 0.02 s"]


def test_a_site_that_makes_no_step_is_given_up(run_sites):
    codes, lines = run_sites(
        """
if site == "b":
    second = (folder / "first").exists()
    (folder / ("second" if second else "first")).touch()
    sys.exit(1)
wait_for("second")
time.sleep(1.0)
""",
        limit=1,
    )
    assert codes == [0, 1]
    assert lines[-1] == (
        "geojax launch: site b failed, exit code 1, without a new step, too often; it is not "
        "started again"
    )


def test_new_steps_are_read_off_the_lines_of_progress(run_sites):
    codes, lines = run_sites(
        """
if site == "b":
    step = len(list(folder.glob("start*")))
    (folder / f"start{step}").touch()
    print(f"step {min(step + 1, 3)}/9  loss 1", flush=True)
    sys.exit(1)
wait_for("start3")
time.sleep(1.0)
""",
        limit=0,
    )
    assert codes == [0, 1]
    assert len(lines) == 4, "steps 1, 2, 3, and 3 again"


def test_bad_input_is_not_tried_again(run_sites):
    codes, lines = run_sites("sys.exit(2 if site == 'b' else 0)")
    assert (codes, lines) == ([0, 2], [])


def test_a_site_that_starts_when_another_is_done_is_ended(run_sites):
    codes, lines = run_sites(
        """
alive()
starts = len(list(folder.glob(f"start{site}*")))
(folder / f"start{site}{starts}").touch()
print("step 1/2  loss 1" if not starts else "joining", flush=True)
if site == "b" and not starts:
    sys.exit(1)
if site == "a":
    wait_for("startb1")
else:
    time.sleep(60)
"""
    )
    assert codes == [0]
    assert lines[1:] == ["geojax launch: the run is done without site b, which is ended"]
