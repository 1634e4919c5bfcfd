"""Three islands in one process, joined by TCP, of whom one may die at any point of a step.

A thread is a process of a site. Those of one site compute the same, each by itself: what they do
together, and in which order, is as in a site whose devices wait for each other.
"""

import copy
import queue
import threading
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from support.islands import data_islands, shares, site_plans
from support.ports import free_port
from support.small_models import make_batch, model_of
from support.thread_talk import SharedTalk, ThreadTalk

from geojax.errors import RunError
from geojax.islands.actions import breadth_first, data_actions
from geojax.islands.going_on.deciding_process import DecidingProcess
from geojax.islands.going_on.following_process import FollowingProcess
from geojax.islands.going_on.member_transport import MemberTransport
from geojax.islands.going_on.returning import catch_up, rehearse, take_state
from geojax.islands.going_on.site_membership import Surroundings
from geojax.islands.going_on.steps import SharedStep, record_of_start, run_step
from geojax.islands.walk import Walk
from geojax.job.island_env import IslandSettings
from geojax.membership.file_store import FileRecordStore
from geojax.transport import Membership, Streams
from geojax.transport.carrier import Limits
from geojax.transport.connect import begin
from geojax.transport.door import Door, connect_more, enter
from geojax.transport.endpoint import ProcessOfSite

NAMES = ("east", "mid", "west")
LIMITS = Limits(Streams(1, 1 << 18), 1 << 28, 20.0, goes_on=True)
LEASE = 20.0
CHUNKS, HELD, MODEL = 2, 1, "llama"
DOOR_SECONDS = 0.25
"""Time for which a door listens at a time, so that it is shut soon after its site has died."""
_AWAY_SECONDS = 0.2
"""Pause before a step while a site is away that returns, so that the run does not end before."""
TAKEN = -1
"""Step of a death that comes when another site has returned as far as it has the state."""


class Death(NamedTuple):
    """The point at which a site dies."""

    site: int
    step: int
    """Its step, or the first after it in which this site, and each that returns, takes part."""
    operation: int
    """Number of the offer, or of the message taken, before which it dies; one more: before the
    update; then: after it."""
    returns: bool = False
    """Its process starts again, and returns to the run."""
    process: int = 0
    """The process of the site that dies, and all others with it."""


class Died(Exception):
    """A site that the test lets die."""


class LocalChannel:
    """A `geojax.runtime.process_channel.ProcessChannel` between threads."""

    def __init__(self, own, site):
        self.own, self._site = own, site
        self.others = tuple(range(1, len(site.queues))) if own == 0 else (0,)

    def send(self, text):
        """Send a text."""
        for other in self.others:
            self._site.queues[other].put((self.own, text))

    def received(self):
        """Yield what has come; a dead process takes the others of its site with it."""
        if self._site.dead.is_set():
            raise Died
        while not self._site.queues[self.own].empty():
            yield self._site.queues[self.own].get()

    def close(self):
        """Nothing."""


class _Site:
    """The channels of a start of a site."""

    def __init__(self, processes):
        self.queues = [queue.SimpleQueue() for _ in range(processes)]
        self.talk = SharedTalk(processes)
        self.dead = threading.Event()


class Mortal(MemberTransport):
    """A transport whose process dies before one of its operations."""

    def __init__(self, membership, death, dead, may_die):
        super().__init__(membership)
        self._death, self._dead, self.step, self._left = death, dead, 0, None
        self._may_die = may_die

    def count(self):
        """Count an operation of the step under way."""
        if self._dead.is_set():
            raise Died
        if self._death is None or self.step < self._death.step:
            return
        if self._left is None and not self._may_die(self._death):
            return
        if self._left is None:
            self._left = self._death.operation
        if self._left == 0:
            self._dead.set()
            raise Died
        self._left -= 1

    def offer(self, receiver, key, arrays):
        self.count()
        super().offer(receiver, key, arrays)

    def fetch(self, sender, key, like):
        return _MortalFetch(self, super().fetch(sender, key, like))


class _MortalFetch:
    def __init__(self, transport, fetch):
        self._transport, self._fetch = transport, fetch

    def __getattr__(self, name):
        return getattr(self._fetch, name)

    def result(self, timeout_seconds=None):
        arrays = self._fetch.result(timeout_seconds)
        self._transport.count()
        return arrays


class Islands:
    """The programs of three sites, for runs of a few steps each."""

    def __init__(self, **options):
        self.plans = site_plans(len(NAMES), {"data": 1}, **options)
        self.model = model_of(MODEL)
        made = data_islands(self.model, self.plans, chunks=CHUNKS, held=HELD)
        self.islands = made
        self.first_states = [island.state for island in made]
        self.batches = shares(make_batch(self.model), len(NAMES))
        microbatches = self.plans[0].layout.batch.microbatches
        self.schedule = breadth_first(CHUNKS, microbatches, HELD)

    def train(self, folder, steps, deaths=(), **options):
        """Train so many steps; the metrics of each step and the state of each site that is left."""
        run = _Run(self, Path(folder), steps, deaths, **options)
        threads = [
            threading.Thread(target=run.process, args=(site, process))
            for site in range(len(NAMES))
            for process in range(run.processes[site])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in run.errors.values():
            raise error
        return run


def settings_of(site, doors):
    """The place of a site among all."""
    return IslandSettings(
        site=NAMES[site], sites=NAMES, coordinators=doors, key="k" * 32, address="127.0.0.1"
    )


class _Run:
    def __init__(
        self,
        islands,
        folder,
        steps,
        deaths,
        lease=LEASE,
        without_door=None,
        processes=1,
        keeps_batch=True,
        unseen=None,
    ):
        self._without_door = without_door
        self.processes = processes if isinstance(processes, tuple) else (processes,) * len(NAMES)
        """Number of processes of each site."""
        self._keeps_batch = keeps_batch
        self._unseen = unseen
        """A share of the batch without targets, and the step from which on it has none."""
        self.metrics, self.states, self.errors = {}, {}, {}
        self.returned_at, self.times = {}, {site: [] for site in range(len(NAMES))}
        self._doors = tuple(f"127.0.0.1:{free_port()}" for _ in NAMES)
        self.lines = {site: [] for site in range(len(NAMES))}
        self.agreed = {}
        self._away = set()
        """Processes of sites that have died, will return, and are not back."""
        self._all, self._folder, self._steps = islands, folder, steps
        self._lease = lease
        self._deaths = {
            site: [death for death in deaths if death.site == site] for site in range(len(NAMES))
        }
        """Each site's, of one start after the other."""
        count = sum(self.processes)
        self._met, self._ended = threading.Barrier(count), threading.Barrier(count)
        self._starts, self._memberships, self._of_others = {}, {}, {}
        self._taken, self._dying = threading.Event(), threading.Lock()
        self._sites = {
            site: [_Site(self.processes[site]) for _ in range(1 + len(of_site))]
            for site, of_site in self._deaths.items()
        }
        """Channels of all starts of each site."""
        self._x64 = jax.config.jax_enable_x64

    def process(self, site, process):
        """Run a process of a site to its end."""
        try:
            with jax.enable_x64(self._x64):
                self._live_on(site, process)
        except BaseException as error:
            self.errors[site] = error
        try:
            self._ended.wait(300)
        finally:
            if (membership := self._memberships.get((site, process))) is not None:
                membership.close()
            self._starts[site, process].transport.close()

    def _live_on(self, site, process):
        """Live, die as is written, and return each time."""
        for number, death in enumerate([*self._deaths[site], None]):
            try:
                if number == 0:
                    self._live(site, process)
                else:
                    self._return_at_last(site, process, number)
                return
            except Died:
                assert death is not None, "it dies as often as is written"
                if death.returns:
                    self._away.add((site, process))
                self._end(site, process)
                if not death.returns:
                    return
                time.sleep(2 * DOOR_SECONDS)  # until its door is shut

    def _return_at_last(self, site, process, number):
        """Return; begin again, as a supervisor does, where another site dies meanwhile."""
        while True:
            try:
                return self._return(site, process, number)
            except RunError:
                if (
                    self._without_door is not None
                    or self.states
                    or sum(self.processes) > len(NAMES)
                ):
                    raise
                self._end(site, process)

    def _end(self, site, process):
        self._memberships[site, process].close()
        self._starts[site, process].transport.close(failed=True)

    def _begun(self, site, process, number=0):
        talk = ThreadTalk(process, self._sites[site][number].talk)
        place, count = settings_of(site, self._doors), self.processes[site]
        return begin(Membership(place, process, count, {}, talk=talk), LIMITS)

    def _live(self, site, process):
        islands = self._all
        island = islands.islands[site]
        joined = self._starts[site, process] = self._begun(site, process)
        carrier = joined.transport
        self._met.wait(300)
        for other in range(len(NAMES)):
            if other != site:
                carrier.take_up(joined.peers(other, self._processes_of(other)))
        membership = self._membership(site, process, joined, 0)
        transport = self._transport(site, process, membership, 0)
        record = self._record(site, transport)
        programs = island.walk.programs
        membership.begin(record, programs.sums, saved=0, last_step=self._steps)
        self._open_door(site, joined, membership)
        walk = Walk(island.walk.actions, island.walk.windows, programs, transport)
        state = jax.tree.map(jnp.copy, islands.first_states[site])
        self._train(site, process, membership, walk, 0, state)

    def _open_door(self, site, joined, membership):
        if site != self._without_door:
            own = self._processes_of(site)
            membership.open_door(lambda: Door(joined.members.island, own, "a run"))

    def _processes_of(self, site):
        starts = [self._starts[site, each] for each in range(self.processes[site])]
        return [ProcessOfSite("here", each.endpoint.text()) for each in starts]

    def _record(self, site, transport):
        """The record on which all processes of all sites agree."""
        mesh = self._all.islands[site].plan.mesh
        return record_of_start(self._store(), "record", transport, mesh)

    def _transport(self, site, process, membership, number):
        """The transport of a start, which dies if that is written."""
        own = self._deaths[site][number : number + 1]
        death = next((each for each in own if each.process == process), None)
        return Mortal(membership, death, self._sites[site][number].dead, self._may_die)

    def _may_die(self, death):
        """True if no other site is away, or dies now."""
        if death.step == TAKEN:
            return self._taken.is_set()
        with self._dying:
            is_alone = not self._away
            if is_alone and death.returns:
                self._away.add((death.site, death.process))
            return is_alone

    def _membership(self, site, process, joined, number):
        channel = LocalChannel(process, self._sites[site][number])
        membership = self._membership_of(site, joined, channel)
        self._memberships[site, process] = membership
        return membership

    def _membership_of(self, site, joined, channel):
        def connect(sites):
            connect_more(joined, [NAMES[site] for site in sites], LIMITS.silence_seconds)

        around = Surroundings(
            joined.transport, channel, joined.peers, connect, self._lease, self._keeps_batch
        )
        if channel.own > 0:
            return FollowingProcess(around)
        return DecidingProcess(
            around,
            self._store(),
            "record",
            5.0,
            lambda kind, step, text: self.lines[site].append(text),
        )

    def _store(self):
        return FileRecordStore(self._folder / "record.json", "run")

    def _return(self, site, process, number):
        islands = self._all
        island = copy.copy(islands.islands[site])
        joined = self._starts[site, process] = self._begun(site, process, number)
        joined = enter(joined, LIMITS.silence_seconds)
        membership = self._membership(site, process, joined, number)
        transport = self._transport(site, process, membership, number)
        programs = island.walk.programs
        walk = Walk(island.walk.actions, island.walk.windows, programs, transport)
        state = jax.tree.map(jnp.copy, islands.first_states[site])
        island.state = state
        state = rehearse(walk, state, island.signals(), island.inputs(islands.batches[site]))
        state = take_state(membership, programs, state, self._steps)
        self._let_another_die(site)
        state = catch_up(membership, programs, state, lambda step: None)
        self._open_door(site, joined, membership)
        self._away.discard((site, process))
        self.returned_at[site] = int(state.step)
        self._train(site, process, membership, walk, int(state.step), state)

    def _let_another_die(self, site):
        """Let the site die that dies when another one has the state, and wait for it."""
        for other, deaths in self._deaths.items():
            if other != site and TAKEN in [death.step for death in deaths]:
                self._taken.set()
                assert self._sites[other][0].dead.wait(60)

    def _train(self, site, process, membership, walk, done, state):
        islands = self._all
        island, transport = copy.copy(islands.islands[site]), walk.transport
        carrier = membership.transport
        metrics = []
        if process == 0:
            self.metrics[site] = metrics
        for number in range(done + 1, self._steps + 1):
            transport.step = number
            if self._away:
                time.sleep(_AWAY_SECONDS)

            def inputs(share, state=state, number=number):
                island.state, batch = state, islands.batches[share]
                if (
                    self._unseen is not None
                    and share == self._unseen[0]
                    and number >= self._unseen[1]
                ):
                    batch = batch | {"loss_mask": np.zeros_like(batch["loss_mask"])}
                return island.inputs(batch)

            step = SharedStep(number, self._lists, inputs)
            state, own = run_step(membership, walk, step, state, island.signals())
            transport.count()
            metrics.append(jax.device_get(own))
            self.times[site].append(time.monotonic())
        # Each process has heard another site.
        self.agreed[site, process] = membership.agreed({site, process})
        # As the last save does, which takes all sites.
        gone = [
            site
            for site, deaths in self._deaths.items()
            if not all(death.returns for death in deaths)
        ]
        while set(carrier.counters) != set(range(len(NAMES))) - {site, *gone} and not self.errors:
            membership.poll()
            time.sleep(0.01)
        island.state = state
        if process == 0:
            self.states[site] = island.whole()
        self._of_others[site, process] = metrics
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and len(self.states) + len(gone) < len(NAMES):
            membership.poll()
            time.sleep(0.01)
        carrier.drain()
        membership.close()

    def _lists(self, of_sites):
        return [data_actions(self._all.schedule, site, of_sites) for site in range(len(NAMES))]

    def assert_processes_agree(self):
        """Hold all processes of a site to the bits of the first."""
        for (site, process), metrics in self._of_others.items():
            assert metrics == self._of_others[site, 0], (site, process)
            wanted = set.intersection(*({site, each} for each in range(self.processes[site])))
            assert set(self.agreed[site, process]) == wanted


def assert_same(run, wanted):
    """Hold all sites that are left to the bits of an undisturbed run."""
    for site, metrics in run.metrics.items():
        if site not in run.states:
            continue
        for own, of_all in zip(metrics, wanted.metrics[0][-len(metrics) :], strict=True):
            for name in of_all.keys() - {"stop", "save"}:
                assert own[name] == of_all[name], (site, name)
        jax.tree.map(np.testing.assert_array_equal, run.states[site], wanted.states[0])
