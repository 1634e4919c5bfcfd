"""Files of geojax that a batch crosses from the data to the update of the state, in order.

    python tests/support/core_files.py [--golden NAME] [--tree REPOSITORY] [--calls] [--most FILES]

One step of `geojax train` runs in this process, with a config of `tests/support/golden_hlo.py`. A
profiler notes each function of geojax that gets numbers made of the batch: sequences, activations,
gradients, sums or a state. It looks in the training loop, and while the step is traced. A file of
such a function is crossed by the batch, in whichever room of geojax it lies.

`--tree` takes another checkout of the repository, with its own goldens, to compare with.
"""

import argparse
import inspect
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

HOST = ("TrainingLoop._train", "TrainingLoop._finish_oldest")
"""Functions that take a step: what they call is called for a batch."""

TRACED = ("train_step", "update_state")
"""Functions that are traced into the step's program."""

OTHER = ("TrainingLoop._validate", "TrainingLoop._save")
"""Functions that the training loop calls for other things than a step."""


class Call(NamedTuple):
    caller: str
    """File of geojax that called, or whose function was handed down."""
    file: str
    function: str


class Recorder:
    """A profiler that notes calls between files of geojax inside a step.

    On the host the batch is in arrays of NumPy and of JAX. In a trace it is in tracers: a constant,
    such as the table of a pipeline, is not made of the batch.
    """

    def __init__(self, package: Path, host: tuple[type, ...], traced: tuple[type, ...]) -> None:
        self.calls: dict[Call, bool] = {}
        """Calls in their order, and if they are traced."""
        self._root = f"{package}/"
        self._host = host
        self._traced = traced
        self._stack: list[tuple[int, tuple[type, ...]]] = []
        self._thread = threading.get_ident()

    @property
    def files(self) -> list[str]:
        """Files in the order of the first call of each: on the host, then traced."""
        return list(dict.fromkeys(call.file for call in sorted(self.calls, key=self.calls.get)))

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
        arrays = self._stack[-1][1] if self._stack else ()
        function = frame.f_code.co_qualname
        if function in TRACED:
            arrays = self._traced
        elif function in HOST:
            arrays = self._host
        elif function in OTHER:
            arrays = ()
        self._stack.append((id(frame), arrays))
        if arrays and any(holds(value, arrays) for value in arguments_of(frame)):
            call = Call(self._caller(frame), name.removeprefix(self._root), function)
            self.calls.setdefault(call, arrays == self._traced)

    def _caller(self, frame: FrameType) -> str:
        back = frame.f_back
        while back is not None and not (back.f_code.co_filename or "").startswith(self._root):
            back = back.f_back
        return "" if back is None else back.f_code.co_filename.removeprefix(self._root)


def arguments_of(frame: FrameType) -> list[Any]:
    """Return the values that a function was called with."""
    code = frame.f_code
    stars = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + stars]
    return [frame.f_locals.get(name) for name in names]


def holds(value: Any, arrays: tuple[type, ...]) -> bool:
    """Tell if a value is an array, or a collection or object that has one in it.

    NumPy's arrays inside an object are tables of a plan.
    """
    if isinstance(value, arrays):
        return True
    if isinstance(value, dict):
        return any(holds(each, arrays) for each in value.values())
    if isinstance(value, list | tuple):
        return any(holds(each, arrays) for each in value)
    fields = getattr(value, "__dataclass_fields__", ())
    return any(holds(getattr(value, name, None), arrays[:1]) for name in fields)


def record(tree: Path, golden: str) -> Recorder:
    """Run one step of a golden in the checkout at `tree`, and record its calls in order."""
    os.environ["NPROC"] = "32"
    sys.path[:0] = [str(tree), str(tree / "tests")]
    import jax
    import numpy as np
    from support.golden_hlo import COMMON, CONFIGS
    from support.small_runs import prepare_corpus, write_config

    from geojax.cli.main import main

    config = COMMON | CONFIGS[golden]
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "run_directory": f"{folder}/run",
            "steps": 1,
            "model": config["model"] | {"vocab_size": 301},
            "data": {"sources": [{"name": "sums", "prepared": str(prepare_corpus(Path(folder)))}]},
        }
        path = write_config(Path(folder) / "run.yaml", Path(folder), **config | changes)
        recorder = Recorder(tree / "geojax", (jax.Array, np.ndarray), (jax.core.Tracer,))
        sys.argv = ["geojax", "train", str(path)]
        sys.setprofile(recorder)
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
        finally:
            sys.setprofile(None)
    return recorder


def run_script() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--golden", default="zero-3-overlap", help="name in golden_hlo.py")
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[2])
    parser.add_argument("--calls", action="store_true", help="print who calls each file, and what")
    parser.add_argument("--most", type=int, help="most files that may be crossed")
    arguments = parser.parse_args()
    recorder = record(arguments.tree.resolve(), arguments.golden)
    print(f"\n{arguments.golden}: a batch crosses {len(recorder.files)} files, in order:")
    for number, file in enumerate(recorder.files, 1):
        print(f"  {number:2} {file}")
        if arguments.calls:
            for call in (call for call in recorder.calls if call.file == file):
                print(f"       {call.function}, from {call.caller}")
    return int(arguments.most is not None and len(recorder.files) > arguments.most)


if __name__ == "__main__":
    sys.exit(run_script())
