"""How often a program was compiled: once, unless its inputs change from call to call."""

from typing import Self

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """Counts the compilations of the jitted function called `name` while it is entered.

    A program found in the compilation cache counts too: it was asked for.
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
        self.count += event == _EVENT and details.get("fun_name") == self._name
