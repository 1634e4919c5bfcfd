"""A hook that runs before C++ aborts this process because of an exception that nobody caught."""

import ctypes
from collections.abc import Callable

_HANDLER = ctypes.CFUNCTYPE(None)
_LIBRARY, _SET_TERMINATE = "libstdc++.so.6", "_ZSt13set_terminatePFvvE"  # std::set_terminate
_installed: list[object] = []  # what C++ calls must live as long as the process


def before_abort(act: Callable[[], None]) -> bool:
    """Call `act` before such an abort, in the thread of the exception; the abort follows it.

    Returns:
        whether the hook could be installed: it needs the C++ library of GCC, as JAX on Linux does.
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
