"""Three islands in one process, joined by TCP, of whom one may die at any point of a step."""

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

from geojax.islands.actions import breadth_first, data_actions
from geojax.islands.going_on.member_transport import MemberTransport
from geojax.islands.going_on.returning import catch_up, rehearse, take_state
from geojax.islands.going_on.site_membership import SiteMembership
from geojax.islands.going_on.steps import SharedStep, record_of_start, run_step
from geojax.islands.walk import Walk
from geojax.job.island_env import IslandSettings
from geojax.membership.file_store import FileRecordStore
from geojax.runtime.rendezvous import Presence
from geojax.transport import Membership, Streams
from geojax.transport.carrier import Limits
from geojax.transport.connect import begin
from geojax.transport.door import Door, enter

NAMES = ("east", "mid", "west")
LIMITS = Limits(Streams(1, 1 << 18), 1 << 28, 20.0, goes_on=True)
LEASE = 20.0
CHUNKS, HELD, MODEL = 2, 1, "llama"
_AWAY_SECONDS = 0.2
"""Pause before a step while a site is away that returns, so that the run does not end before."""


class Death(NamedTuple):
    """The point at which a site dies."""

    site: int
    step: int
    operation: int
    """Number of the offer, or of the message taken, before which it dies; one more: before the
    update; then: after it."""
    returns: bool = False
    """Its process starts again, and returns to the run."""


class Died(Exception):
    """A site that the test lets die."""


class Mortal(MemberTransport):
    """A transport whose site dies before one of its operations."""

    def __init__(self, membership, death):
        super().__init__(membership)
        self._death, self.step, self._left = death, 0, None

    def count(self):
        """Count an operation of the step under way."""
        if self._death is None or (self.site, self.step) != self._death[:2]:
            return
        if self._left is None:
            self._left = self._death.operation
        if self._left == 0:
            self._membership.transport.close(failed=True)
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

    def train(self, folder, steps, deaths=(), lease=LEASE, without_door=None):
        """Train so many steps; the metrics of each step and the state of each site that is left."""
        run = _Run(self, Path(folder), steps, deaths, lease, without_door)
        threads = [threading.Thread(target=run.site, args=(site,)) for site in range(len(NAMES))]
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
    def __init__(self, islands, folder, steps, deaths, lease, without_door):
        self._without_door = without_door
        self.metrics, self.states, self.errors = {}, {}, {}
        self.returned_at, self.times = {}, {site: [] for site in range(len(NAMES))}
        self._doors = tuple(f"127.0.0.1:{free_port()}" for _ in NAMES)
        self.lines = {site: [] for site in range(len(NAMES))}
        self.detected = {}
        self.died = None
        self._all, self._folder, self._steps = islands, folder, steps
        self._deaths, self._lease = {death.site: death for death in deaths}, lease
        self._met, self._ended = threading.Barrier(len(NAMES)), threading.Barrier(len(NAMES))
        self._starts = {}
        self._x64 = jax.config.jax_enable_x64

    def site(self, site):
        """Run a site to its end."""
        try:
            with jax.enable_x64(self._x64):
                self._live(site)
        except Died:
            self.died = time.monotonic()
            if self._deaths[site].returns:
                try:
                    with jax.enable_x64(self._x64):
                        self._return(site)
                except BaseException as error:
                    self.errors[site] = error
        except BaseException as error:
            self.errors[site] = error
        try:
            self._ended.wait(300)
        finally:
            self._starts[site].transport.close()

    def _live(self, site):
        islands = self._all
        island = islands.islands[site]
        members = Membership(settings_of(site, self._doors), 0, 1, {})
        joined = begin(members, LIMITS)
        carrier = joined.transport
        self._starts[site] = joined
        self._met.wait(300)
        for other in range(len(NAMES)):
            if other != site:
                text = self._starts[other].endpoint.text()
                presence = Presence(process=0, host="here", site=NAMES[other], endpoint=text)
                carrier.take_up(joined.peer(other, presence))
        membership = self._membership(site, joined)
        transport = Mortal(membership, self._deaths.get(site))
        record = record_of_start(membership.store, "record", transport, island.plan.mesh)
        programs = island.walk.programs
        membership.begin(record, programs.sums, saved=0, last_step=self._steps)
        if site != self._without_door:
            membership.open_door(Door(joined.members.island, joined.endpoint.text(), "a run"))
        walk = Walk(island.walk.actions, island.walk.windows, programs, transport)
        self._train(site, membership, walk, 0, jax.tree.map(jnp.copy, islands.first_states[site]))

    def _membership(self, site, joined):
        return SiteMembership(
            joined.transport,
            FileRecordStore(self._folder / "record.json", "run"),
            "record",
            self._lease,
            5.0,
            lambda kind, step, text: self.lines[site].append(text),
            joined.peer,
        )

    def _return(self, site):
        islands = self._all
        island = islands.islands[site]
        joined = self._starts[site] = begin(
            Membership(settings_of(site, self._doors), 0, 1, {}), LIMITS
        )
        enter(joined, LIMITS.silence_seconds)
        membership = self._membership(site, joined)
        transport = Mortal(membership, None)
        programs = island.walk.programs
        walk = Walk(island.walk.actions, island.walk.windows, programs, transport)
        state = jax.tree.map(jnp.copy, islands.first_states[site])
        island.state = state
        state = rehearse(walk, state, island.signals(), island.inputs(islands.batches[site]))
        state = take_state(membership, programs, state, self._steps)
        state = catch_up(membership, programs, state)
        self.returned_at[site] = int(state.step)
        self._train(site, membership, walk, int(state.step), state)

    def _is_away(self):
        """True while a site has died that will return and is not back."""
        return self.died is not None and any(
            death.returns and death.site not in self.returned_at for death in self._deaths.values()
        )

    def _train(self, site, membership, walk, done, state):
        islands = self._all
        island, transport = islands.islands[site], walk.transport
        carrier = membership.transport
        self.metrics[site] = []
        for number in range(done + 1, self._steps + 1):
            transport.step = number
            if self._is_away():
                time.sleep(_AWAY_SECONDS)

            def inputs(share, state=state):
                island.state = state
                return island.inputs(islands.batches[share])

            step = SharedStep(number, self._lists, inputs)
            state, metrics = run_step(membership, walk, step, state, island.signals())
            transport.count()
            self.metrics[site].append(jax.device_get(metrics))
            self.times[site].append(time.monotonic())
        # As the last save does, which takes all sites.
        gone = [death.site for death in self._deaths.values() if not death.returns]
        while set(carrier.counters) != set(range(len(NAMES))) - {site, *gone} and not self.errors:
            membership.check()
            time.sleep(0.01)
        island.state = state
        self.states[site] = island.whole()
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and len(self.states) + len(gone) < len(NAMES):
            membership.check()
            time.sleep(0.01)
        carrier.drain()
        membership.close()

    def _lists(self, of_sites):
        return [data_actions(self._all.schedule, site, of_sites) for site in range(len(NAMES))]


def assert_same(run, wanted):
    """Hold all sites that are left to the bits of an undisturbed run."""
    for site, metrics in run.metrics.items():
        if site not in run.states:
            continue
        for own, of_all in zip(metrics, wanted.metrics[0][-len(metrics) :], strict=True):
            for name in of_all.keys() - {"stop", "save"}:
                assert own[name] == of_all[name], (site, name)
        jax.tree.map(np.testing.assert_array_equal, run.states[site], wanted.states[0])
