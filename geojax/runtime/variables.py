"""Environment variables that geojax, JAX and XLA read: names and values that cannot be meant.

Nobody reads a variable whose name is misspelt, and XLA ends the process on a flag that it does not
know; so both are refused before anything starts.
"""

import functools
import importlib.util
import os
import re
import tempfile
from collections.abc import Mapping

from jaxlib import xla_client

from geojax.errors import UserError
from geojax.job.cluster_env import VARIABLES
from geojax.job.island_env import VARIABLES as ISLAND_VARIABLES
from geojax.runtime.jax_private import backend_runs
from geojax.suggestions import did_you_mean

_MOST_THREADS = 2**16
_MOST_DEVICES = 2**16
_PLUGINS = {
    "cpu": (),
    "gpu": ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm60_plugin", "jax_rocm7_plugin"),
    "cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin"),
    "rocm": ("jax_rocm60_plugin", "jax_rocm7_plugin"),
}
"""Packages of which JAX needs one, by the platform in JAX_PLATFORMS."""


def check_environment(environment: Mapping[str, str]) -> None:
    """Check the variables that geojax, JAX and XLA read in `environment`.

    Raises:
        UserError: a GEOJAX_ variable has no such name, or NPROC, JAX_PLATFORMS or
            XLA_FLAGS a value that ends the process later.
    """
    variables = list(dict.fromkeys([*VARIABLES.values(), *ISLAND_VARIABLES.values()]))
    for name in environment:
        if name.startswith("GEOJAX_") and name not in variables:
            hint = did_you_mean(name, variables)
            raise UserError(f"{name}: geojax reads no variable of this name; {hint}")
    threads = environment.get("NPROC", "")
    if threads and not (re.fullmatch("[0-9]{1,9}", threads) and 1 <= int(threads) <= _MOST_THREADS):
        raise UserError(f"NPROC={threads}: is no number of threads from 1 to {_MOST_THREADS}")
    _check_platforms(environment.get("JAX_PLATFORMS", ""))
    if not backend_runs():
        _check_xla_flags(environment.get("XLA_FLAGS", "").strip())


def _check_platforms(given: str) -> None:
    for platform in given.split(",") if given else ():
        if platform not in _PLUGINS:
            raise UserError(f"JAX_PLATFORMS={given}: '{platform}' is none of {', '.join(_PLUGINS)}")
        packages = _PLUGINS[platform]
        if packages and not any(importlib.util.find_spec(package) for package in packages):
            raise UserError(
                f"JAX_PLATFORMS={given}: {platform} needs one of {', '.join(packages)}, and none "
                "is installed"
            )


@functools.cache
def _check_xla_flags(flags: str) -> None:
    """Let a forked child read XLA_FLAGS, which XLA does once in a process and aborts if it fails.

    Raises:
        UserError: the child died of them.
    """
    if not flags:
        return
    if not flags.startswith("--") and not os.path.isfile(flags):  # a device would be read for ever
        raise UserError(
            f"XLA_FLAGS={flags[:200]}: is neither flags, which begin with --, nor a file"
        )
    devices = re.search(r"--xla_force_host_platform_device_count=(\S+)", flags)
    if devices and not (devices[1].isdecimal() and 1 <= int(devices[1]) <= _MOST_DEVICES):
        raise UserError(f"XLA_FLAGS: {devices[0]}: is no number from 1 to {_MOST_DEVICES}")
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if child == 0:
            os.dup2(file.fileno(), 2)
            os.environ["XLA_FLAGS"] = flags
            _ = xla_client.CompileOptions().executable_build_options.debug_options
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            return
        file.seek(0)
        said = file.read().decode(errors="replace")
    problem = re.search(r"^[EF][0-9]{4} .*?\] (.*)$", said, re.MULTILINE)
    raise UserError(f"XLA_FLAGS: {problem[1] if problem else f'XLA cannot read {flags[:200]}'}")
