"""TCP connections of this process, reset as routers and firewalls do it."""

import contextlib
import ctypes
import os
from pathlib import Path
from typing import NamedTuple

_ESTABLISHED = "01"
_LIBC = ctypes.CDLL(None, use_errno=True)


class Connection(NamedTuple):
    """One end of an established connection over IPv4."""

    inode: int
    remote_port: int


def connections():
    """All of this process and its neighbors in the network namespace."""
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {
        Connection(int(row[9]), int(row[2].partition(":")[2], 16))
        for row in rows
        if row[3] == _ESTABLISHED
    }


def reset(chosen):
    """Send a reset to the other ends of this process's connections; return their number."""
    inodes = {each.inode for each in chosen}
    own = {}  # copies by their inode: nobody uses their numbers again meanwhile
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            copy = os.dup(int(entry))
            inode = os.fstat(copy).st_ino
            if inode not in inodes or inode in own:
                os.close(copy)
            else:
                own[inode] = copy
    unspecified = (ctypes.c_char * 16)()  # a struct sockaddr of AF_UNSPEC
    for copy in own.values():
        assert _LIBC.connect(copy, unspecified, 16) == 0, os.strerror(ctypes.get_errno())
        os.close(copy)
    return len(own)
