"""The door of a site in a run, at which a site that returns asks, and learns how to reach it.

    returning site → each other site    what run is this?            facts of the run
    returning site → each other site    here is my new endpoint      the site's endpoint, the facts

Each of the two is a rendezvous of two processes (`geojax.runtime.rendezvous`): the door is process
0, whoever comes is process 1. It has a key of its own, which the run's makes, so that nobody takes
a door for the rendezvous of a start.
"""

import contextlib
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from geojax.errors import MissingProcessesError, RunError, UserError
from geojax.job.island_env import IslandSettings
from geojax.runtime import rendezvous
from geojax.runtime.rendezvous import Presence
from geojax.transport.connect import Joined, own_address, wait_for_all

_SLICE_SECONDS = 5.0
"""Time for which a door listens at a time."""
_PAUSE_SECONDS = 0.5
_ASK_SECONDS = 3.0
"""Time that a site has to answer."""


class Door:
    """The door of this site, open until the process ends.

    Args:
        island: this site among all.
        endpoint: text of this process's endpoint.
        facts: text about the run.
    """

    def __init__(self, island: IslandSettings, endpoint: str, facts: str):
        self.arrivals: queue.SimpleQueue[Presence] = queue.SimpleQueue()
        """Processes of other sites that have come with an endpoint."""
        self.problem: str | None = None
        """Reason why nobody can come, or could not at one time."""
        self._island, self._endpoint, self._facts = island, endpoint, facts
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="geojax door", daemon=True).start()

    def close(self) -> None:
        """Admit nobody any more."""
        self._closed.set()

    def _run(self) -> None:
        island = self._island
        own = island.coordinators[island.sites.index(island.site)]
        while not self._closed.is_set():
            try:
                everyone = rendezvous.join(
                    0,
                    2,
                    own,
                    island.site,
                    _SLICE_SECONDS,
                    own_address(island),
                    self._endpoint,
                    _key(island),
                    self._facts,
                )
            except MissingProcessesError:  # nobody has come
                continue
            except (UserError, RunError) as error:  # the port is taken, or somebody does not fit
                self.problem = str(error)
                self._closed.wait(_PAUSE_SECONDS)
                continue
            _, guest = everyone.processes
            if guest.endpoint is not None:
                self.arrivals.put(guest)


def enter(joined: Joined, seconds: float) -> None:
    """Connect with the sites of the run that goes on; a failure closes the transport.

    Args:
        joined: this process, whose port is open.
        seconds: time for the connections.

    Raises:
        UserError: this site does not fit to the others.
        RunError: no site answers.
    """
    members, transport, endpoint = joined
    with contextlib.ExitStack() as on_error:
        on_error.callback(transport.close, failed=True)
        answers = ask_doors(members.island, endpoint.text())
        if not answers:
            raise RunError("no other site of the run that goes on answers any more")
        peers = []
        for name, (presence, _) in answers.items():
            peers.append(joined.peer(members.island.sites.index(name), presence))
        for peer in peers:
            transport.take_up(peer)
        wait_for_all(members, transport, peers, seconds)
        on_error.pop_all()


def ask_doors(
    island: IslandSettings, endpoint: str | None = None, seconds: float = _ASK_SECONDS
) -> dict[str, tuple[Presence, str]]:
    """Ask at the doors of all other sites; return who has answered by site, with the facts.

    Args:
        island: this site among all.
        endpoint: text of this process's endpoint, which the others are to reach; None: only ask.
        seconds: time that they have to answer.
    """
    others = [
        (name, door)
        for name, door in zip(island.sites, island.coordinators, strict=True)
        if name != island.site
    ]
    with ThreadPoolExecutor(len(others), "geojax ask") as threads:
        answers = threads.map(lambda each: _ask(island, each[1], endpoint, seconds), others)
        return {
            name: answer
            for (name, _), answer in zip(others, answers, strict=True)
            if answer is not None
        }


def _ask(
    island: IslandSettings, door: str, endpoint: str | None, seconds: float
) -> tuple[Presence, str] | None:
    """Ask at a door; return who has answered, and the facts; None: nobody."""
    deadline = time.monotonic() + seconds
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            everyone = rendezvous.join(
                1, 2, door, island.site, remaining, endpoint=endpoint, key=_key(island)
            )
        except MissingProcessesError:
            return None
        except UserError:  # somebody else is at the door at this moment
            time.sleep(min(_PAUSE_SECONDS, max(0.0, deadline - time.monotonic())))
            continue
        if everyone.note is not None:
            return everyone.processes[0], everyone.note
    return None


def _key(island: IslandSettings) -> bytes:
    return f"{island.key}\ndoor".encode()
