"""XLA flags for tests, which compile for seconds what runs for milliseconds.

Loops and fusions come from the older emitters where XLA still has them (JAX before 0.11), in one
LLVM module that LLVM hardly optimizes: a training step compiles in a quarter of the time. Passes
that place collectives stay as they are.
"""

import importlib.metadata
import os

_JAXLIB = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2]))

COMPILE_FAST = (
    "--xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"
    # Without a GPU nothing can be timed, and the kernels to choose from would all be compiled.
    " --xla_gpu_autotune_level=0"
)
# XLA ends the process at a flag that it does not know.
if _JAXLIB < (0, 11):
    COMPILE_FAST += " --xla_cpu_use_fusion_emitters=false"
if _JAXLIB >= (0, 12):
    COMPILE_FAST += " --xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE"

AS_IN_A_RUN = {"xla_cpu_opt_preset": "CPU_OPT_PRESET_DEFAULT"} if _JAXLIB >= (0, 12) else {}
"""Compiler options where buffers are looked at: to compile fast, JAX 0.12 copies more."""

MAX_ISA = " ".join(
    flag
    for flag in os.environ.get("XLA_FLAGS", "").split()
    if flag.startswith("--xla_cpu_max_isa=")
)
"""The newest instructions that the tests' own process may use, also for those that it starts."""
