"""Compilations of programs: JAX's cache on disk, and a count of how often one was requested."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import jax
from jax.experimental.compilation_cache import compilation_cache

from geojax.errors import UserError
from geojax.runtime.agreement import processes_that_differ

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
# Time in which all processes read the folder, which may be on a busy network file system.
_LISTING_SECONDS = 300.0


def enable_compilation_cache(folder: Path) -> str | None:
    """Keep compiled programs in `folder` (made if needed), so that the next run need not compile.

    Programs that compile in less than half a second are not kept. All processes of a job call this,
    and use the cache only if all find the same programs in it. On GPUs, processes that compile a
    program share the autotuning of its kernels (`xla_gpu_shard_autotuning`), so that all compile
    the same. A process with a cached program publishes no results, and another would wait for them
    up to a day. Without that flag programs would differ between processes, and so could the order
    of their collectives (openxla/xla#7716).

    Returns:
        One line for the log if the cache is not used, with the reason.

    Raises:
        UserError: the folder cannot be made.
        MissingProcessesError: another process did not come to compare.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        digest = programs_digest(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot hold the compilation cache ({error.strerror})") from None
    differing = processes_that_differ("compilation cache", digest, _LISTING_SECONDS)
    if differing.size:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX looks at the setting once
        return (
            f"compilation cache: not used, because {folder} does not hold the same programs for "
            f"{differing} as for process 0. If all processes share a folder ($XDG_CACHE_HOME), a "
            "restart need not compile"
        )
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return None


def programs_digest(folder: Path) -> str:
    """Return a digest of the names of the programs that JAX's cache in `folder` holds."""
    names = sorted(path.name for path in folder.iterdir() if path.name.endswith("-cache"))
    return hashlib.sha256("\n".join(names).encode("utf-8", "surrogateescape")).hexdigest()


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

    Args:
        name: the function's.
        programs: number of functions of that name.
    """

    def __init__(self, name: str, programs: int = 1):
        self._name, self._programs = f"jit({name})", programs
        self._compiled = 0

    @property
    def count(self) -> int:
        """Compilations of each function, the mean of all rounded up."""
        return -(-self._compiled // self._programs)

    def __enter__(self) -> Self:
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *exception: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **details: str | int) -> None:
        self._compiled += event == _COMPILE_EVENT and details.get("fun_name") == self._name
