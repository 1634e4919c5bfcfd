"""Garbage collections of Python, which hold up a step, and all processes that wait for it."""

import contextlib
import gc
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def long_lived_apart() -> Iterator[Callable[[], None]]:
    """Leave out of collections what lives as long as a run.

    A full collection looks at every object. Those that JAX has traced and compiled are hundreds of
    thousands, at which it looks for tenths of a second.

    Yields:
        A function that leaves out what has come since, too.
    """
    gc.collect()
    gc.freeze()
    try:
        yield gc.freeze
    finally:
        gc.unfreeze()
