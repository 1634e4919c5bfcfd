"""TransformerEngine on a machine that need not have a GPU."""

import ctypes
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from geojax.precision import transformer_engine

_CAPABILITY, _HOPPER = "get_device_compute_capability", 90

_OF_THE_DRIVER = (
    "cuCtxGetCurrent",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuInit",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleLoadDataEx",
    "cuModuleUnload",
    "cuTensorMapEncodeIm2col",
    "cuTensorMapEncodeTiled",
)
"""What the libraries that the package loads are linked to."""
_NO_DEVICE = 100

# It is in the extra `te`, with gigabytes of NVIDIA's libraries, and not in `test`.
needs_transformer_engine = pytest.mark.skipif(
    not importlib.util.find_spec("transformer_engine"), reason="needs transformer-engine"
)


def for_hopper(monkeypatch):
    """Let the package be imported and believe that it sees a Hopper GPU, or skip the test."""
    _let_a_driver_be_found()
    reason = transformer_engine.unsupported_reason()
    if reason and "cannot be imported" in reason:  # a library that it is linked to is missing
        pytest.skip(reason)
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine") and hasattr(module, _CAPABILITY):
            monkeypatch.setattr(module, _CAPABILITY, lambda _=0: _HOPPER)


def in_plain_jax(monkeypatch):
    """Let its kernels be plain JAX, which it has for each of them."""
    monkeypatch.setenv("NVTE_JAX_CUSTOM_CALLS", "false")


def _let_a_driver_be_found():
    """Where there is no driver, compile one that knows no device."""
    try:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        if not shutil.which("cc"):  # TransformerEngine's libraries do not load without either
            pytest.skip("needs NVIDIA's driver, or cc to compile a stand-in")
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder, "driver.c"), Path(folder, "libcuda.so.1")
            functions = (f"int {name}(void) {{ return {_NO_DEVICE}; }}" for name in _OF_THE_DRIVER)
            source.write_text("\n".join(functions))
            soname = f"-Wl,-soname,{library.name}"
            subprocess.run(["cc", "-shared", "-fPIC", soname, "-o", library, source], check=True)
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
