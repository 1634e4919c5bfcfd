"""Random loss of packets by an XDP program, which needs neither netem nor a compiler."""

import ctypes
import os
import platform
import socket
import struct
from collections.abc import Callable

from geojax.wan.namespaces import inside

_BPF = {"x86_64": 321, "aarch64": 280}
"""Number of bpf(2)."""
_PROG_LOAD, _LINK_CREATE = 5, 28
_XDP_PROGRAM, _XDP_ATTACHMENT = 6, 37
_CALL, _EXIT, _SET, _SET_32, _SKIP_IF_GREATER = 0x85, 0x95, 0xB7, 0xB4, 0x2E
_RANDOM = 7
"""Helper that returns 32 random bits."""
_DROP, _PASS = 1, 2
_ATTRIBUTE_BYTES = 144
_LIBC = ctypes.CDLL(None, use_errno=True)


def drop_packets(namespace: str, device: str, share: float) -> Callable[[], None]:
    """Drop a share of the packets that come in through a device; return what ends that.

    Raises:
        OSError: this kernel or user has no XDP.
    """
    program = _load(share)
    try:
        with inside(namespace):
            index = socket.if_nametoindex(device)
            link = _bpf(_LINK_CREATE, struct.pack("<IIII", program, index, _XDP_ATTACHMENT, 0))
    finally:
        os.close(program)
    return lambda: os.close(link)


def _load(share: float) -> int:
    threshold = int(share * 2**32)
    instructions = [
        _instruction(_CALL, number=_RANDOM),
        _instruction(_SET_32, to=1, number=threshold - (threshold >> 31 << 32)),
        _instruction(_SKIP_IF_GREATER, to=0, source=1, skip=2),
        _instruction(_SET, number=_DROP),
        _instruction(_EXIT),
        _instruction(_SET, number=_PASS),
        _instruction(_EXIT),
    ]
    code = ctypes.create_string_buffer(b"".join(instructions), 8 * len(instructions))
    license_name = ctypes.create_string_buffer(b"GPL")
    addresses = ctypes.addressof(code), ctypes.addressof(license_name)
    return _bpf(_PROG_LOAD, struct.pack("<IIQQ", _XDP_PROGRAM, len(instructions), *addresses))


def _instruction(code: int, to: int = 0, source: int = 0, skip: int = 0, number: int = 0) -> bytes:
    return struct.pack("<BBhi", code, to | source << 4, skip, number)


def _bpf(command: int, attribute: bytes) -> int:
    memory = ctypes.create_string_buffer(attribute, _ATTRIBUTE_BYTES)
    number = _BPF.get(platform.machine(), -1)
    descriptor: int = _LIBC.syscall(number, command, memory, _ATTRIBUTE_BYTES)
    if descriptor < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"bpf: {os.strerror(error)}")
    return descriptor
