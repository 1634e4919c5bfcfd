"""Times of programs on one device, and a table of them."""

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

CALLS, REPEATS = 10, 5
COMPILERS = 8
"""Programs that are compiled at a time."""


def compiled(
    functions: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]],
    options: dict[str, str | bool] | None = None,
) -> dict[str, jax.stages.Compiled | str]:
    """Compile functions for their arguments; one that does not compile has its error's first line.

    Args:
        functions: by name, a function and its arguments, arrays or their shapes.
        options: the compiler's options.
    """

    def compile_one(each: tuple[Callable[..., Any], tuple[Any, ...]]) -> Any:
        function, arguments = each
        try:
            return jax.jit(function).lower(*arguments).compile(compiler_options=options)
        except Exception as error:
            return first_line(error)

    with ThreadPoolExecutor(COMPILERS) as threads:
        return dict(zip(functions, threads.map(compile_one, functions.values()), strict=True))


def first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0][:200]


def seconds(program: Callable[..., Any], *arguments: Any, chained: bool = False) -> float:
    """Return the median time of a call, of which the device has several queued.

    Args:
        program: starts its work and returns before it is done.
        arguments: its arguments.
        chained: each call takes the result of the last one as its first argument, which it donates.
    """
    first, rest = arguments[0], arguments[1:]
    times = []
    for repeat in range(REPEATS + 1):
        begin = time.perf_counter()
        for _ in range(CALLS if repeat else 1):
            made = program(first, *rest)
            first = made if chained else first
        jax.block_until_ready(made)
        times.append((time.perf_counter() - begin) / CALLS)
    return statistics.median(times[1:])


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose first column is text and whose others are numbers."""
    widths = [max(len(row[n]) for row in (columns, *rows)) for n in range(len(columns))]
    print(f"\n{title}")
    for row in (columns, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip(), flush=True)
