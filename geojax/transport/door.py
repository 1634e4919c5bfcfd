"""The door of a site in a run, at which a site that returns asks, and learns how to reach it.

    returning site → each other site    what run is this?             facts of the run
    returning site → each other site    here are my new processes     its processes, the facts

Each of the two is a rendezvous (`geojax.runtime.rendezvous`) of two: the first process of the site
at the door, and the first one of the site that comes. It has a key of its own, which the run's
makes, so that nobody takes a door for the rendezvous of a start.
"""

import contextlib
import json
import queue
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pydantic

from geojax.errors import MissingProcessesError, RunError, UserError
from geojax.job.island_env import IslandSettings
from geojax.runtime import rendezvous
from geojax.runtime.rendezvous import Presence
from geojax.transport.connect import Joined, connect_with, own_address
from geojax.transport.endpoint import ProcessOfSite, as_text, processes_of

_SLICE_SECONDS = 5.0
"""Time for which a door listens at a time."""
_PAUSE_SECONDS = 0.5
_ASK_SECONDS = 3.0
"""Time that a site has to answer."""


class Answer(NamedTuple):
    """A site's answer at its door."""

    facts: str
    """Text about the run."""
    processes: str
    """The processes of the site, as `geojax.transport.endpoint.as_text` tells them."""


class _DoorNote(pydantic.BaseModel):
    """Text of a site at its door."""

    facts: str
    processes: str


class Door:
    """The door of this site, which its first process opens until it ends.

    Args:
        island: this site among all.
        processes: its processes.
        facts: text about the run.
    """

    def __init__(self, island: IslandSettings, processes: Sequence[ProcessOfSite], facts: str):
        self.arrivals: queue.SimpleQueue[Presence] = queue.SimpleQueue()
        """Sites that have come: the first process of each, with the text of all."""
        self.problem: str | None = None
        """Reason why nobody can come, or could not at one time."""
        self._island = island
        self._note = _DoorNote(facts=facts, processes=as_text(processes)).model_dump_json()
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
                    key=_key(island),
                    note=self._note,
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


def enter(joined: Joined, seconds: float) -> Joined:
    """Connect with the sites of the run that goes on; a failure closes the transport.

    All processes of this site call it together.

    Args:
        joined: this process, whose port is open.
        seconds: time for the connections.

    Returns:
        The same, with the processes of this site.

    Raises:
        UserError: this site does not fit to the others.
        RunError: no site answers.
    """
    with contextlib.ExitStack() as on_error:
        on_error.callback(joined.transport.close, failed=True)
        joined = joined.gathered(seconds)
        if not connect_more(joined, joined.members.island.sites, seconds):
            raise RunError("no other site of the run that goes on answers any more")
        on_error.pop_all()
    return joined


def connect_more(joined: Joined, sites: Sequence[str], seconds: float) -> list[str]:
    """Connect with sites of the run that goes on, if they answer at their doors.

    All processes of this site call it together.

    Args:
        joined: this process, whose port is open, with the processes of its site.
        sites: names of sites to which it has no connection; its own is left out.
        seconds: time for the connections.

    Returns:
        The names of the sites that have answered.

    Raises:
        UserError: this site does not fit to the others.
        RunError: a site has answered, and is lost since.
    """
    island = joined.members.island

    def ask() -> str:
        answers = ask_doors(island, as_text(joined.processes), sites=sites)
        return json.dumps({name: answer.processes for name, answer in answers.items()})

    told = json.loads(joined.members.talk.told_by_first("doors", ask, _ASK_SECONDS + seconds))
    processes = {
        island.sites.index(name): processes_of(text, f"site {name}") for name, text in told.items()
    }
    connect_with(joined, processes, seconds)
    return list(told)


def ask_doors(
    island: IslandSettings,
    processes: str | None = None,
    seconds: float = _ASK_SECONDS,
    sites: Sequence[str] | None = None,
) -> dict[str, Answer]:
    """Ask at the doors of other sites; return the answers of those that are there, by site.

    The first process of this site asks for all.

    Args:
        island: this site among all.
        processes: text of the processes of this site, which the others are to reach; None: only
            ask.
        seconds: time that they have to answer.
        sites: names of the sites to ask; None: all others.
    """
    others = [
        (name, door)
        for name, door in zip(island.sites, island.coordinators, strict=True)
        if name != island.site and (sites is None or name in sites)
    ]

    def ask(door: str) -> Answer | None:
        return _ask(island, door, processes, seconds)

    with ThreadPoolExecutor(len(others), "geojax ask") as threads:
        answers = threads.map(lambda each: ask(each[1]), others)
        return {
            name: answer
            for (name, _), answer in zip(others, answers, strict=True)
            if answer is not None
        }


def _ask(island: IslandSettings, door: str, processes: str | None, seconds: float) -> Answer | None:
    """Ask at a door; return who has answered, and the facts; None: nobody."""
    deadline = time.monotonic() + seconds
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            everyone = rendezvous.join(
                1, 2, door, island.site, remaining, endpoint=processes, key=_key(island)
            )
        except (MissingProcessesError, UserError):  # nobody is at the door, or another site is too
            pause = random.uniform(0.2, 1.0) * _PAUSE_SECONDS
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            continue
        try:
            note = _DoorNote.model_validate_json(everyone.note or "")
        except pydantic.ValidationError:
            raise UserError(
                f"site {island.site} may not return: the site at {door} has another version of "
                "geojax"
            ) from None
        return Answer(note.facts, note.processes)
    return None


def _key(island: IslandSettings) -> bytes:
    return f"{island.key}\ndoor".encode()
