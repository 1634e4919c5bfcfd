"""Files that a batch crosses from the YAML to the update of the state, in order, and back calls.

    python tests/support/core_files.py [--tree REPOSITORY] [--edges]

One step of `geojax train` on two simulated sites runs in this process, with ZeRO 2 and with the
gradients' reduction overlapped, and a profiler notes each call of a function of geojax that gets
numbers made of the batch (sequences, activations, gradients, sums, a state): in the training loop,
and while the step is traced.

    core       the files of train/ and step/ with such a call, behind those that read the YAML and
               plan the step. The libraries below (models, collectives, optim, ...) are called
               through functions that say what they do: their files are counted apart.
    back call  a core file calls an earlier one that it imports: the reader has to turn back. A
               function that was handed down, such as the layer of a scan, is no back call.

`--tree` takes another checkout of the repository, to compare with.
"""

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

CORE = ("train/", "step/")
"""Folders of the run and of the step; all others are libraries."""

FIRST = ("RunConfig.load", "train", "step_plan")
"""Functions that lead from the YAML to the plan of the step, before there are numbers."""

HOST = ("_train", "_finish_oldest")
"""Functions of the training loop that take a step: what they call is called for a batch."""

TRACED = ("train_step", "update_state")
"""Functions that are traced into the step's program."""

NOT_FOR_THE_BATCH = ("_validate", "_save", "initial_state")
"""Functions of the training loop for other things than a step."""


class Call(NamedTuple):
    caller: str
    """File of geojax that called, or whose function was handed down."""
    file: str
    function: str


class Recorder:
    """A profiler that notes calls between files of geojax inside a step."""

    def __init__(self, package: Path, arrays: tuple[type, ...], leaves: Any) -> None:
        self.first: dict[str, None] = {}
        self.calls: list[Call] = []
        self._root = f"{package}/"
        self._arrays = arrays
        self._leaves = leaves
        self._stack: list[tuple[int, bool]] = []
        self._thread = threading.get_ident()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if event == "return":
            if self._stack and self._stack[-1][0] == id(frame):
                self._stack.pop()
            return
        name = frame.f_code.co_filename or ""
        if event != "call" or not name.startswith(self._root):
            return
        inside = bool(self._stack) and self._stack[-1][1]
        function = frame.f_code.co_name
        if frame.f_code.co_qualname in FIRST and name.startswith(f"{self._root}train/"):
            self.first.setdefault(name.removeprefix(self._root))
        if function in HOST + TRACED:
            inside = True
        elif function in NOT_FOR_THE_BATCH:
            inside = False
        self._stack.append((id(frame), inside))
        if inside and function != "<module>" and self._has_numbers(frame):
            self.calls.append(
                Call(self._caller(frame), name.removeprefix(self._root), frame.f_code.co_qualname)
            )

    def _has_numbers(self, frame: FrameType) -> bool:
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount
        given = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
        return any(self._is_number(leaf) for leaf in self._leaves(given))

    def _is_number(self, leaf: Any) -> bool:
        if isinstance(leaf, self._arrays):
            return True
        fields = getattr(leaf, "__dataclass_fields__", {})
        held = [getattr(leaf, name, None) for name in fields if hasattr(leaf, name)]
        return any(isinstance(each, self._arrays) for each in self._leaves(held))

    def _caller(self, frame: FrameType) -> str:
        back = frame.f_back
        while back is not None and not (back.f_code.co_filename or "").startswith(self._root):
            back = back.f_back
        return "" if back is None else back.f_code.co_filename.removeprefix(self._root)


def record(tree: Path) -> Recorder:
    """Run one step of the checkout at `tree` and record its calls in order."""
    sys.path[:0] = [str(tree), str(tree / "tests")]
    os.environ["NPROC"] = "32"
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    import jax
    import numpy as np
    from support.small_runs import prepare_corpus, write_config

    from geojax.cli.main import main

    with tempfile.TemporaryDirectory() as folder:
        corpus = prepare_corpus(Path(folder))
        overlap = "overlap_grad_reduce" if (tree / "geojax/step").exists() else "overlap"
        config = write_config(
            Path(folder) / "run.yaml",
            corpus,
            steps=1,
            simulate_devices=4,
            mesh={"dc": 2, "data": 2},
            zero={"stage": 2},
            communication={overlap: True},
        )
        recorder = Recorder(tree / "geojax", (jax.Array, np.ndarray), jax.tree.leaves)
        sys.argv = ["geojax", "train", str(config)]
        sys.setprofile(recorder)
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
        finally:
            sys.setprofile(None)
    return recorder


def core_files(recorder: Recorder) -> list[str]:
    """List the core files in the order in which the batch reaches them: host first, then traced."""
    traced = [file for file in order(recorder.calls) if file.startswith("step/")]
    host = [file for file in order(recorder.calls) if file.startswith("train/")]
    found = dict.fromkeys(recorder.first)
    found.update(dict.fromkeys(host + traced))
    return list(found)


def order(calls: Iterable[Call]) -> list[str]:
    """List the files of calls in the order of the first call of each."""
    return list(dict.fromkeys(call.file for call in calls))


def back_calls(recorder: Recorder, core: list[str], package: Path) -> list[Call]:
    """Find the calls of a core file into an earlier one that it imports."""
    position = {file: index for index, file in enumerate(core)}
    found: dict[tuple[str, str], Call] = {}
    for call in recorder.calls:
        if position.get(call.file, len(core)) < position.get(call.caller, -1):
            module = "geojax." + call.file.removesuffix(".py").replace("/", ".")
            source = (package / call.caller).read_text(encoding="utf-8")
            if f"from {module} import" in source:
                found.setdefault((call.caller, call.file), call)
    return list(found.values())


def run_script() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[2])
    parser.add_argument("--edges", action="store_true", help="print who calls whom as well")
    arguments = parser.parse_args()
    tree = arguments.tree.resolve()
    recorder = record(tree)
    core = core_files(recorder)
    libraries = [file for file in order(recorder.calls) if file not in core]
    print(f"\n{len(core)} core files, in order:")
    for number, file in enumerate(core, 1):
        print(f"  {number:2} {file}")
    back = back_calls(recorder, core, tree / "geojax")
    print(f"{len(back)} back calls")
    for call in back:
        print(f"  {call.caller} -> {call.file}: {call.function}")
    print(f"{len(libraries)} files of libraries")
    if arguments.edges:
        for caller, file in sorted({(call.caller, call.file) for call in recorder.calls}):
            names = {call.function for call in recorder.calls if call[:2] == (caller, file)}
            print(f"  {caller} -> {file}: {', '.join(sorted(names))}")


if __name__ == "__main__":
    run_script()
