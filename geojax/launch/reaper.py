"""The reaper: runs one worker's command for `geojax launch` and leaves no process of it behind.

    python reaper.py GRACE_SECONDS COMMAND [ARGUMENT ...]

The launcher controls it through its standard input. A line with a number is a signal for the
command. The end of the input, because the launcher or the connection to its host died, stops the
command: by SIGTERM, and by SIGKILL after GRACE_SECONDS. Processes that the command started and left
behind are killed when it ends. The exit code is the command's, or, as in a shell, 128 + n if the
signal n killed it.

The file uses the standard library alone and runs under any Python 3: over ssh it is sent as it is,
to hosts where nothing is known but a Python.
"""

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FOR_COMMAND_ALONE = signal.SIGUSR1  # asks for a profile, and would end what else is in the group
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
# A process that cannot be killed, for instance because it waits for a dead disk, is left alone.
_SWEEP_SECONDS = 5.0


def main(arguments: list[str]) -> int:
    """Run the command in `arguments[1:]` and return its exit code."""
    grace_seconds, command = float(arguments[0]), arguments[1:]
    _linux_prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wakeup = _signals_to_pipe()
    try:
        # Safe although it runs Python between fork and exec: this process has one thread.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_lead_own_group)
    except OSError as error:
        print(f"{command[0]}: cannot be started ({error.strerror})", file=sys.stderr)
        return 127
    code = _wait(process, wakeup, grace_seconds)
    _sweep(process.pid)
    return code if code >= 0 else 128 - code


def _lead_own_group() -> None:
    os.setpgid(0, 0)
    _linux_prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # if somebody kills the reaper itself


def _linux_prctl(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError, OSError):  # other systems have no such thing
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _signals_to_pipe() -> int:
    """Let every signal arrive as a byte, its number, in the pipe whose reading end is returned."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in (*_FORWARDED, _FOR_COMMAND_ALONE, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return reading


def _wait(process: "subprocess.Popen[bytes]", wakeup: int, grace_seconds: float) -> int:
    """Pass signals on to the command until it has ended; return its code."""
    launcher = sys.stdin.fileno()
    unread, kill_at = b"", None
    with selectors.DefaultSelector() as selector:
        selector.register(launcher, selectors.EVENT_READ)
        selector.register(wakeup, selectors.EVENT_READ)
        while (code := process.poll()) is None:
            remaining = None if kill_at is None else max(0.0, kill_at - time.monotonic())
            for key, _ in selector.select(remaining):
                piece = os.read(key.fd, 4096)
                if key.fd == wakeup:
                    for number in piece:
                        if number in _FORWARDED:
                            _send(process, number)
                        elif number == _FOR_COMMAND_ALONE:
                            process.send_signal(number)
                elif piece:
                    *lines, unread = (unread + piece).split(b"\n")
                    for line in lines:
                        _send(process, int(line))
                else:
                    selector.unregister(launcher)
                    _send(process, signal.SIGTERM)
                    kill_at = time.monotonic() + grace_seconds
            if kill_at is not None and time.monotonic() >= kill_at:
                _send(process, signal.SIGKILL)
                kill_at = None
    return code


def _send(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Send a signal to the whole group, as a terminal does: shell scripts pass nothing on."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _sweep(group: int) -> None:
    """Kill what is left of the command's group, and orphans that have left the group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + _SWEEP_SECONDS
    while time.monotonic() < deadline:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not ended:
            for child in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.01)


def _children() -> list[int]:
    own, children = str(os.getpid()), []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8") as file:
            # The second field, the command's name in brackets, may hold anything.
            if file.read().rpartition(")")[2].split()[1] == own:
                children.append(int(name))
    return children


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
