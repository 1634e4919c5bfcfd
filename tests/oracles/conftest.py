"""Without the extra `oracles` no test of this folder is collected, and running it is an error.

Those of lm-eval need the extra `harness` besides, and those of adapters peft.
"""

import importlib.util


def _is_installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) for module in modules)


collect_ignore_glob = [] if _is_installed("transformers") else ["test_*.py"]
collect_ignore = [] if _is_installed("lm_eval", "accelerate") else ["test_harness.py"]
collect_ignore += [] if _is_installed("peft") else ["test_peft.py"]
