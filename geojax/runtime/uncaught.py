"""What this process does before C++ aborts it because of an exception that nobody caught."""

import ctypes
from collections.abc import Callable

_HANDLER = ctypes.CFUNCTYPE(None)
_LIBRARY, _SET_TERMINATE = "libstdc++.so.6", "_ZSt13set_terminatePFvvE"  # std::set_terminate
_installed: list[object] = []  # what C++ calls must live as long as the process


def before_abort(act: Callable[[], None]) -> bool:
    """Call `act` then, in the thread of the exception; if it returns, the process is aborted.

    Returns:
        Whether that can be had: it needs the C++ library of GCC, which JAX uses on Linux.
    """
    try:
        set_terminate = getattr(ctypes.CDLL(_LIBRARY), _SET_TERMINATE)
    except (OSError, AttributeError):
        return False

    def handle() -> None:
        act()
        previous()

    handler = _HANDLER(handle)
    set_terminate.restype, set_terminate.argtypes = _HANDLER, [_HANDLER]
    previous = set_terminate(handler)
    _installed.append(handler)
    return True
