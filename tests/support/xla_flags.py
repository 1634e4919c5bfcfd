"""Tests compile for seconds what runs for milliseconds: LLVM optimises it less.

XLA's own passes, and so the programs that tests look at, are the same.
"""

LESS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
