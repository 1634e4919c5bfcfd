"""The rendezvous of all processes before JAX connects them: each joins and learns of the others.

JAX's own start-up ends the process (in C++, with a stack trace that does not name the process that
is missing) when one does not join in time. So process 0 first listens on the coordinator's port
itself. Each process receives two lines and sends one, so that N processes need 3N messages:

    process 0  → process i    a `Greeting` with a nonce that is new for each connection
    process i  → process 0    a `Hello`, signed with the run's key and that nonce
    process 0  → process i    a `Verdict`, signed too: the facts of all, or why the job cannot start

The greeting costs a round trip; the signatures of 3,000 processes take a fraction of a second.
Only a process whose own time is up before the verdict sends a second line,
`messages.WHO_IS_MISSING`.

Nothing that a stranger sends to the port ends or delays a start. A hello that the run's key has not
signed for this very connection is ignored and counted by address, for the message of a time-out;
connections that never become a process are closed. A process that has the key and does not fit
ends the start with an error that names it. A run without a key signs with the empty one, as any
stranger can.
"""

import sys
import time
from collections.abc import Callable, Sequence

from geojax.network_names import HostPort
from geojax.runtime.rendezvous.client import join_server
from geojax.runtime.rendezvous.messages import Everyone, Presence, named, own_hello
from geojax.runtime.rendezvous.server import RendezvousServer

__all__ = ["Everyone", "Presence", "join"]


def join(
    process: int,
    count: int,
    coordinator: str,
    site: str | None,
    timeout_seconds: float,
    bind_address: str | None = None,
    endpoint: str | None = None,
    key: bytes = b"",
    note: str | None = None,
    names: Callable[[Sequence[int]], str] = named,
) -> Everyone:
    """Meet the other processes of the job; return the facts of each.

    Args:
        process: index of this process.
        count: number of processes of the job.
        coordinator: host:port of process 0, as the other processes reach it.
        site: name of this process's site; None if sites have no names.
        timeout_seconds: time to wait for the others.
        bind_address: address that process 0 listens on; None: the coordinator's.
        endpoint: text about this process for all others; a transport's address.
        key: secret that the processes of the run share; empty: none.
        note: text of process 0 for all others, at most `messages.LONGEST_NOTE` letters.
        names: text that names processes for which this one waits. It is shown after
            `messages.SAY_SECONDS`, in process 0, and where that one is missing itself.

    Raises:
        MissingProcessesError: some process did not join in time; it is named. In processes other
            than 0 also when the coordinator cannot be reached or has another key.
        RunError: in process 0, the coordinator's name has no address until the time is up.
        UserError: processes disagree on their number or on versions, two claim the same index, some
            name a site and others none, or process 0 cannot listen at the coordinator's address.
    """
    host, port = HostPort.parse(coordinator)
    own = own_hello(process, count, site, endpoint)
    deadline = time.monotonic() + timeout_seconds

    def waits(missing: Sequence[int]) -> None:
        text = f"waiting for {names(missing)}, {timeout_seconds:g} s at most"
        print(text, file=sys.stderr, flush=True)

    if process == 0:
        listens_at = bind_address or host
        server = RendezvousServer(own, listens_at, port, key, timeout_seconds, note, waits)
        return server.serve(deadline)
    return join_server(own, host, port, key, timeout_seconds, deadline, waits)
