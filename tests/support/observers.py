"""Trackers that record, and trackers that do what libraries do at their worst."""

import os
import signal
import sys
import time
from pathlib import Path


class Recording:
    """Writes each call as a line, and prints where a run would print."""

    def __init__(self, path):
        self._path = Path(path)

    def write(self, line):
        with self._path.open("a") as file:
            file.write(f"{line}\n")

    def start(self, run):
        print("begun")
        self.write(f"start {run.name} {run.id} {run.step} {run.site} {run.config['seed']}")

    def log(self, step, values):
        self.write(f"{step} {values}")

    def finish(self, exit_code):
        self.write(f"finish {exit_code}")


class Faulty(Recording):
    """Fails at the steps that name a fault."""

    def log(self, step, values):
        for fault in values:
            if fault == "raise":
                raise ValueError("no such metric\nand more")
            if fault == "exit":
                sys.exit("the library ends")
            if fault == "interrupt":
                raise KeyboardInterrupt
            if fault == "die":
                os._exit(3)
            if fault == "hang":
                time.sleep(600)
            if fault == "print":
                print("x" * 3_000_000)
            if fault == "signals":
                for number in (signal.SIGINT, signal.SIGTERM):
                    os.kill(os.getpid(), number)
        super().log(step, values)


class HangingAt:
    """Hangs in one method."""

    def __init__(self, method):
        self._method = method

    def _call(self, method):
        if method == self._method:
            time.sleep(600)

    def start(self, run):
        self._call("start")

    def log(self, step, values):
        self._call("log")

    def finish(self, exit_code):
        self._call("finish")


class WithoutFinish:
    def start(self, run):
        pass

    def log(self, step, values):
        pass
