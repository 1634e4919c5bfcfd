"""The reaper on its own: what it does with its input, and when the launcher is gone."""

import signal
import subprocess
import sys
from pathlib import Path

from support.processes import PATIENCE_SECONDS, is_running, wait_until

from geojax.launch import reaper

READY = "import signal, sys, time; {setup}; print('ready', flush=True); time.sleep(600)"


def start(program, grace="5"):
    """A reaper around a Python program that has printed 'ready'."""
    command = [sys.executable, "-I", reaper.__file__, grace, sys.executable, "-S", "-c", program]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_line_is_a_signal():
    process = start(READY.format(setup="signal.signal(10, lambda *_: sys.exit(9))"))
    process.stdin.write("10\n")
    process.stdin.flush()
    assert process.wait(timeout=PATIENCE_SECONDS) == 9


def test_the_end_of_its_input_is_the_end_of_the_command():
    process = start(READY.format(setup="signal.signal(15, lambda *_: sys.exit(143))"))
    process.stdin.close()
    assert process.wait(timeout=PATIENCE_SECONDS) == 143


def test_who_does_not_end_then_is_killed():
    process = start(READY.format(setup="signal.signal(15, signal.SIG_IGN)"), grace="0.2")
    process.stdin.close()
    assert process.wait(timeout=PATIENCE_SECONDS) == 137


def test_signals_to_the_reaper_are_for_the_command():
    process = start(READY.format(setup="signal.signal(2, lambda *_: sys.exit(130))"))
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=PATIENCE_SECONDS) == 130


def test_a_request_to_profile_is_for_the_command_alone():
    others = "import subprocess; other = subprocess.Popen(['sleep', '600'])"
    received = "signal.signal(10, lambda *_: sys.exit(9 if other.poll() is None else 1))"
    process = start(READY.format(setup=f"{others}; {received}"))
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=PATIENCE_SECONDS) == 9


def test_a_reaper_that_is_killed_takes_its_command_with_it():
    setup = "import os; print(os.getpid(), flush=True)"
    command = [sys.executable, "-I", reaper.__file__, "5", sys.executable, "-S", "-c"]
    process = subprocess.Popen(
        [*command, READY.format(setup=setup)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    wait_until(lambda: not is_running(child))


def test_the_whole_file_is_sent_where_nothing_is_installed():
    source = Path(reaper.__file__).read_text()
    command = [sys.executable, "-I", "-S", "-c", source, "5", "sh", "-c", "exit 7"]
    assert subprocess.Popen(command, stdin=subprocess.PIPE).wait(timeout=PATIENCE_SECONDS) == 7
    assert len(source) < 2**15, "it has to fit into a command line"
