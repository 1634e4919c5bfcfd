"""JAX's compilation cache on disk: the second run of a program starts without compiling."""

from pathlib import Path

import jax

from geojax.errors import UserError


def enable_compilation_cache(folder: Path) -> None:
    """Keep compiled programs in `folder` (made if needed), also for later runs.

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
