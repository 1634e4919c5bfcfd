"""Compilations of programs: JAX's cache on disk, and a count of how often one was requested."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import jax
from jax.experimental.compilation_cache import compilation_cache

from geojax.errors import UserError

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def enable_compilation_cache(folder: Path) -> None:
    """Keep compiled programs in `folder` (made if needed), so that the next run need not compile.

    Programs that compile in less than half a second are not kept.

    Raises:
        UserError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot hold the compilation cache ({error.strerror})") from None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Compile every program anew while it is entered.

    A program from the cache has no dump, and took no time to compile.
    """
    settings: Any = jax.config
    enabled = settings.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX looks at the setting once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


class CompilationCounter:
    """Counts the compilations of the jitted function called `name` while it is entered.

    A training step compiles once, unless its inputs change from call to call. A program that is
    found in the compilation cache counts too.
    """

    def __init__(self, name: str):
        self.count = 0
        self._name = f"jit({name})"

    def __enter__(self) -> Self:
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *exception: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **details: str | int) -> None:
        self.count += event == _COMPILE_EVENT and details.get("fun_name") == self._name
