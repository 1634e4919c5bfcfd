"""Sites, links and a store around the production transition function, explored state by state.

    python tests/support/membership_model.py [--seconds 600] [--faults 2] [--order rounds]

Time is a tick of a third of the lease. It passes only when nothing is left to deliver, to answer or
to notice, which is the assumption that those take less than a third of the lease. Faults break it:
a message that is put aside comes at any later time, and a process that is paused wakes at any time.
A state takes longer than that: it crosses while its sender applies steps, or until nothing else is
left to happen.
"""

import argparse
import itertools
import math
import random
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from geojax.membership import events as e
from geojax.membership.member_state import UNKNOWN, MemberState
from geojax.membership.membership_rules import RULES, MembershipRules
from geojax.membership.record import MembershipRecord
from geojax.membership.transition import keeps, may_act, member, returned, transition

SITES = 3
LEASE = 3
STORE = SITES
"""Receiver of a swap that is put aside."""
NOTICED = 2
"""Ticks of silence that are noticed."""
BITS = 24


class Violation(Exception):
    """An invariant that does not hold."""


class Box(NamedTuple):
    """The number of faults of each kind, and of steps."""

    steps: int = 4
    crashes: int = 2
    returns: int = 2
    partitions: int = 1
    messages: int = 2
    pauses: int = 1
    outages: int = 1
    faults: int = 9
    """Most faults of all kinds together; ends of a cut, a pause or an outage do not count."""
    holder: int = 0
    """Holder of the first record; sites take their turns in the order of their numbers."""
    members: int = SITES
    """Members of the first record; the other sites have returned."""
    crossing: int = 1
    """Steps that a holder applies while its state crosses to a returned site."""
    most_queued: int = 1
    join_pause: int = 1
    """Ticks."""
    order: str = "turns"
    """rounds: all sites take their turns, and then a fault may happen; turns: a fault may happen
    between any two turns, and in them; any: each event of each site may be the next."""


class Node(NamedTuple):
    """A site: its state, and what its caller has."""

    state: MemberState | None
    """None: its process has ended."""
    history: tuple[int, ...] = ()
    """The record under which each step of the state on the devices was summed."""
    saved: tuple[int, ...] = ()
    request: Any = None
    """The request to the store that is under way."""
    slept: int = -1
    """Ticks since it was paused; -1: it runs."""
    acts: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Acts on their way: membership_id and history."""


FAULTS = ("crashes", "returns", "partitions", "messages", "pauses", "outages")


class Env(NamedTuple):
    """The store, what was committed, and the faults that are left."""

    record: MembershipRecord
    committed: tuple[int, ...]
    """Most steps on which a site has acted, refused or not: the record of each."""
    is_over: bool
    """An act on the last step was not refused."""
    crashes: int
    returns: int
    messages: int
    pauses: int
    partitions: int
    cut: int
    """A place in `CUTS`."""
    outages: int
    is_out: bool
    faults: int
    turn: int = 0
    """The site whose turn comes first."""


class Net(NamedTuple):
    """Messages on their way, in order for each pair, and those that were put aside."""

    queues: tuple[tuple[Any, ...], ...]
    """Of each pair, and then again of each pair for states, which pass no message."""
    aside: tuple[Any, ...]


LINKS = ((0, 1), (0, 2), (1, 2))
CUTS = (
    (),
    *(tuple(link for link in LINKS if site in link) for site in range(SITES)),
    *((link,) for link in LINKS),
)
"""The links that are cut: none, those of a site, or one."""


def queue_of(sender: int, receiver: int, message: Any = None) -> int:
    return is_state(message) * SITES**2 + sender * SITES + receiver


def is_state(message: Any) -> bool:
    return isinstance(message, e.HandedOver) and message.whole


def queues_to(site: int) -> list[int]:
    """List the queues to a site."""
    return [index for index in range(SITES**2 * 2) if index % SITES == site]


def pair_of(index: int) -> tuple[int, int]:
    """Return the sender and the receiver of a queue."""
    return divmod(index % SITES**2, SITES)


class Interned:
    """Numbers of values, so that a state of the whole is one integer."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.numbers: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        number = self.numbers.get(value)
        if number is None:
            number = self.numbers[value] = len(self.values)
            self.values.append(value)
        return number


World = tuple[int, int, int, int, int]
"""Numbers of three nodes, of the net and of the environment."""


class Model:
    """All that can happen to three sites under some rules."""

    def __init__(self, box: Box, rules: MembershipRules = RULES) -> None:
        self.box, self.rules = box, rules
        self.nodes, self.nets, self.envs = Interned(), Interned(), Interned()
        self._performed: dict[tuple[Any, ...], Any] = {}
        self._sent: dict[tuple[int, int, Any], int] = {}
        self._changed: dict[tuple[Any, ...], int] = {}
        self._agree: dict[tuple[int, int], bool] = {}
        self._permitted: dict[tuple[int, int], bool] = {}
        self.reached: set[str] = set()
        """What returned sites and their holders have done in any state."""

    def start(self) -> World:
        box = self.box
        if not box.faults:
            box = box._replace(**dict.fromkeys(FAULTS, 0))
        record = MembershipRecord(1, tuple(range(box.members)), box.holder)
        nodes = []
        for site in range(SITES):
            if site in record.members:
                state, _ = member(
                    site, SITES, record, last_step=box.steps, lease=LEASE,
                    most_queued=box.most_queued, join_pause=box.join_pause,
                )  # fmt: skip
                nodes.append(self.nodes(Node(state)))
            else:
                nodes.append(self._returned(site, ()))
        env = Env(
            record, (), False, box.crashes, box.returns, box.messages, box.pauses, box.partitions,
            0, box.outages, False, box.faults,
        )  # fmt: skip
        net = Net(((),) * SITES**2 * 2, ())
        return (*nodes, self.nets(net), self.envs(env))

    def _returned(self, site: int, saved: tuple[int, ...]) -> int:
        """Return a site that has begun with its save."""
        state, (request,) = returned(
            site, SITES, last_step=self.box.steps, lease=LEASE, saved=len(saved),
            most_queued=self.box.most_queued, join_pause=self.box.join_pause,
        )  # fmt: skip
        return self.nodes(Node(state, saved, saved, request))

    # One site.

    def perform(self, node_number: int, event: Any, ghost: Any = None) -> tuple[int, tuple]:
        """Return the node after an event, and the messages that it sends."""
        key = (node_number, type(event), event, ghost)  # a tuple equals one of another class
        result = self._performed.get(key)
        if result is None:
            result = self._perform(self.nodes.values[node_number], event, ghost)
            if isinstance(result[0], Node):
                result = (self.nodes(result[0]), result[1])
            self._performed[key] = result
        if isinstance(result, Violation):
            raise result
        return result

    def _perform(self, node: Node, event: Any, ghost: Any) -> tuple[Node, tuple]:
        state, actions = transition(node.state, event, self.rules)
        history, saved, request, acts = node.history, node.saved, node.request, node.acts
        if isinstance(event, e.RecordSeen | e.StoreUnreachable):
            request = None
        sends = []
        for action in actions:
            match action:
                case e.SendTo(site, message):
                    is_handed = isinstance(message, e.HandedOver)
                    handed = history[: message.step] if is_handed else None
                    sends.append((state.site, site, message, handed))
                case e.ReadRecord() | e.SwapRecord():
                    assert request is None, "one request to the store at a time"
                    request = action
                case e.ApplySums(step, membership_id, source):
                    if len(history) != step - 1:
                        raise Violation(f"site {state.site} adds the sums of step {step} twice")
                    if source is None:
                        history = (*history, membership_id)
                    else:
                        if ghost[: step - 1] != history:
                            raise Violation(f"site {state.site}: sums of another state")
                        history = ghost
                case e.TakeState():
                    history = ghost
                case e.RestoreSave():
                    history = saved
                case e.CommitStep(step, membership_id):
                    saved = history[:step]
                    acts = (*acts, (membership_id, saved))
        assert state.applied == len(history), "the state has the steps that it says"
        check_follower(node.state, state, actions)
        self.reached |= set(reached(node.state, state, event, actions))
        return Node(state, history, saved, request, node.slept, acts), tuple(sends)

    # The whole.

    def sent(self, net: int, env: Env, nodes: list[Node], sends: tuple) -> int:
        for sender, receiver, message, handed in sends:
            if nodes[receiver].state is not None and not is_cut(env, sender, receiver):
                index = queue_of(sender, receiver, message)
                net = self._enqueued(net, index, (message, handed))
        return net

    def _enqueued(self, net: int, index: int, message: Any) -> int:
        key = (net, index, message)
        number = self._sent.get(key)
        if number is None:
            queues, aside = self.nets.values[net]
            if message in queues[index]:
                number = net
            else:
                queue = (*queues[index], message)
                number = self.nets(Net((*queues[:index], queue, *queues[index + 1 :]), aside))
            self._sent[key] = number
        return number

    def successors(self, world: World) -> Iterator[tuple[str, World]]:
        """Yield what can happen next; first what happens without any fault, in a fair order."""
        nodes = [self.nodes.values[number] for number in world[:SITES]]
        net: Net = self.nets.values[world[3]]
        env: Env = self.envs.values[world[4]]
        self.check(world, nodes, env)
        if self.is_done(world):
            return
        calm = False
        prompt = self.round if self.box.order == "rounds" else self.prompt
        for label, next_world in prompt(world, nodes, net, env):
            calm = True
            yield label, next_world
            # What follows the first are its variants with a fault, and other orders.
        if not calm:
            yield from self.wait(world, nodes, net, env)
        yield from self.faults(world, nodes, net, env)

    def drawn(self, world: World, draw: random.Random) -> tuple[Any, World] | None:
        """Return an event and the state after it; None: the run is over."""
        nodes = [self.nodes.values[number] for number in world[:SITES]]
        net, env = self.nets.values[world[3]], self.envs.values[world[4]]
        self.check(world, nodes, env)
        if self.is_done(world):
            return None
        sites = [site for site in range(SITES) if nodes[site].state and nodes[site].slept < 0]
        draw.shuffle(sites)
        happenings: list[Iterator[tuple[Any, World]]] = []
        for site in sites:
            happenings = list(self.about_to_happen(world, nodes, net, env, site))
            if happenings:
                break
        if env.faults and draw.random() < 0.1:
            chosen = list(draw.choice(happenings)) if happenings else []
            choices = [*self.faults(world, nodes, net, env), *chosen[1:]] or chosen
            if choices:
                return draw.choice(choices)
        if happenings:
            return next(draw.choice(happenings))
        waited = next(self.wait(world, nodes, net, env), None)
        if waited is not None:
            return waited
        choices = list(self.faults(world, nodes, net, env))
        return draw.choice(choices) if choices else None

    def goes_on(self, world: World) -> bool:
        """Return True if a run without more faults ends all steps, or may wait for ever."""
        visited = set()
        while not self.is_saved(world):
            visited.add(world)
            label, after = next(self.successors(world), (("is over",), world))
            if is_fault(label) or after in visited:
                return self.may_wait(world)
            world = after
        return True

    def prompt(
        self, world: World, nodes: list[Node], net: Net, env: Env
    ) -> Iterator[tuple[Any, World]]:
        """Yield what is about to happen: the turn of the first site, or each event of each site."""
        for place in range(SITES):
            site = (env.turn + place) % SITES
            node = nodes[site]
            if node.state is None or node.slept >= 0:
                continue
            any_here = False
            events = self.prompt_of if self.box.order == "any" else self.turn
            for label, after in events(world, nodes, net, env, site):
                any_here = True
                yield label, after
            if any_here and self.box.order == "turns":
                return

    def round(
        self, world: World, nodes: list[Node], net: Net, env: Env
    ) -> Iterator[tuple[Any, World]]:
        """Yield the turns of all sites, with the messages that were sent before."""
        waiting = [len(queue) for queue in net.queues]

        def turns_from(site: int, begin: World, labels: tuple) -> Iterator[tuple[Any, World]]:
            if site == SITES:
                if labels:
                    yield labels, begin
                return
            nodes = [self.nodes.values[number] for number in begin[:SITES]]
            node, any_here = nodes[site], False
            if node.state is not None and node.slept < 0:
                env, net = self.envs.values[begin[4]], self.nets.values[begin[3]]
                for label, after in self.turn(begin, nodes, net, env, site, waiting):
                    any_here = True
                    yield from turns_from(site + 1, after, (*labels, label))
            if not any_here:
                yield from turns_from(site + 1, begin, labels)

        yield from turns_from(0, world, ())

    def prompt_of(
        self, world: World, nodes: list[Node], net: Net, env: Env, site: int
    ) -> Iterator[tuple[Any, World]]:
        """Yield each thing that is about to happen at a site, and behind it its variants."""
        for variants in self.about_to_happen(world, nodes, net, env, site):
            yield from variants

    def about_to_happen(
        self, world: World, nodes: list[Node], net: Net, env: Env, site: int
    ) -> Iterator[Iterator[tuple[Any, World]]]:
        """Yield each thing that is about to happen at a site: without a fault, then with one."""
        node = nodes[site]
        if node.acts:
            yield iter([self.accept(world, node, env, site)])
        if node.request is not None:
            yield self.answer(world, nodes, env, site)
        for index in queues_to(site):
            if net.queues[index]:
                message, handed = net.queues[index][0]
                left = self._without(world[3], index, 0, aside=False)
                event = e.Received(message)
                yield itertools.chain(
                    self.step(world, nodes, env, site, event, handed, net=left),
                    self.lose(world, env, index, 0),
                )
        for event in notices(nodes, env, site):
            yield self.step(world, nodes, env, site, event)
        state = node.state
        if state.takes_part and state.computing:
            event = e.SumsReady(state.record.membership_id, state.applied + 1)
            yield self.step(world, nodes, env, site, event)

    def turn(
        self, world: World, nodes: list[Node], net: Net, env: Env, site: int,
        counts: list[int] | None = None,
    ) -> Iterator[tuple[Any, World]]:  # fmt: skip
        """Yield a site's turn: all that waits for it happens, and what it asks for comes later.

        In a round `counts` has the number of messages that wait in each queue.
        """
        node, start = nodes[site], world
        labels: list[Any] = []
        crashes: list[tuple[Any, World]] = []
        queues = queues_to(site)
        waiting = [
            (index, entry)
            for index in queues
            for entry in net.queues[index][: None if counts is None else counts[index]]
            if self.has_crossed(nodes, net, index)
        ]

        def happen(steps: Iterator[tuple[Any, World]]) -> None:
            nonlocal world
            (label, after), *variants = steps
            labels.append(label)
            crashes.extend(variants)
            world = after

        def now() -> tuple[list[Node], Env]:
            return [self.nodes.values[number] for number in world[:SITES]], self.envs.values[
                world[4]
            ]

        for _ in node.acts:
            current, env = now()
            happen(iter([self.accept(world, current[site], env, site)]))
        if node.request is not None:
            happen(self.answer(world, *now(), site))
        for index, (message, handed) in waiting:
            left = self._without(world[3], index, 0, aside=False)
            happen(self.step(world, *now(), site, e.Received(message), handed, net=left))
        noticed = next(notices(*now(), site), None)
        while noticed is not None:
            happen(self.step(world, *now(), site, noticed))
            noticed = next(notices(*now(), site), None)
        state = now()[0][site].state
        # A step's sums take longer than a message.
        if node.state.computing and state.takes_part and state.computing:
            event = e.SumsReady(state.record.membership_id, state.applied + 1)
            happen(self.step(world, *now(), site, event))
        if not labels:
            return
        if counts is not None:
            yield ("turn", *labels), world
            yield from crashes
            return
        yield ("turn", *labels), (*world[:4], self._turned(world[4], (site + 1) % SITES))
        yield from crashes
        for index in queues:
            for place in range(len(net.queues[index])):
                yield from self.lose(start, self.envs.values[start[4]], index, place)

    def has_crossed(self, nodes: list[Node], net: Net, index: int) -> bool:
        """Return True unless a queue has a state that is still on its way."""
        state = nodes[pair_of(index)[0]].state
        crosses = index >= SITES**2 and state is not None and state.takes_part
        last_step = (
            max((message.step for message, _ in net.queues[index]), default=0) if crosses else 0
        )
        return not crosses or state.applied >= last_step + self.box.crossing

    def wait(
        self, world: World, nodes: list[Node], net: Net, env: Env
    ) -> Iterator[tuple[Any, World]]:
        """Yield what happens when sites wait: a state arrives, or else time passes."""
        for index, queue in enumerate(net.queues):
            _, site = pair_of(index)
            if queue and nodes[site].slept < 0:
                message, handed = queue[0]
                left = self._without(world[3], index, 0, aside=False)
                event = e.Received(message)
                yield from self.step(world, nodes, env, site, event, handed, net=left)
                yield from self.lose(world, env, index, 0)
                return
        ticked = self.tick(world, nodes, env)
        if ticked != world:
            yield ("a third of the lease passes",), ticked

    def lose(self, world: World, env: Env, index: int, place: int) -> Iterator[tuple[Any, World]]:
        """Yield the loss of a message, and its being put aside to come at any later time."""
        if env.messages:
            message = self.nets.values[world[3]].queues[index][place][0]
            after = self._env(world[4], "messages")
            for aside, words in ((False, "is lost"), (True, "is put aside")):
                net = self._without(world[3], index, place, aside=aside)
                yield (message, words), (*world[:3], net, after)

    def _without(self, number: int, index: int, place: int, *, aside: bool) -> int:
        key = (number, index, place, aside)
        after = self._changed.get(key)
        if after is None:
            net: Net = self.nets.values[number]
            queue = net.queues[index]
            entries = net.aside
            if aside:
                entry = (*pair_of(index), queue[place])
                entries = tuple(sorted((*entries, entry), key=repr))
            queue = (*queue[:place], *queue[place + 1 :])
            queues = (*net.queues[:index], queue, *net.queues[index + 1 :])
            after = self._changed[key] = self.nets(Net(queues, entries))
        return after

    def step(
        self, world: World, nodes: list[Node], env: Env, site: int, event: Any,
        handed: Any = None, *, net: int | None = None,
    ) -> Iterator[tuple[str, World]]:  # fmt: skip
        net = world[3] if net is None else net
        try:
            number, sends = self.perform(world[site], event, handed)
        except Violation as violation:
            raise Violation(f"site {site}: {event}\n{violation}") from None
        check_admission(nodes, self.nodes.values[number], site, event)
        numbers = [*world[:site], number, *world[site + 1 : SITES]]
        if isinstance(event, e.Silent) and is_cut(env, site, event.site):
            # Two thirds of the lease have passed, which a process that is paused has slept.
            for other, node in enumerate(nodes):
                if 0 <= node.slept < NOTICED:
                    numbers[other] = self.nodes(node._replace(slept=NOTICED))
        yield (site, event), (*numbers, self.sent(net, env, nodes, sends), world[4])
        if env.crashes and len(sends) > 1:
            for count in range(1, len(sends)):
                sent = self.sent(net, env, nodes, sends[:count])
                node = self.nodes.values[number]
                crashed = self.crash((*numbers, sent, world[4]), node, env, site)
                yield (site, event, f"crash after {count} message(s)"), crashed

    def answer(
        self, world: World, nodes: list[Node], env: Env, site: int
    ) -> Iterator[tuple[str, World]]:
        request = nodes[site].request
        if env.is_out:
            yield from self.step(world, nodes, env, site, e.StoreUnreachable())
            return
        record = env.record
        if isinstance(request, e.SwapRecord):
            record = self.rules.swap(record, request.expected, request.new)
        number = world[4]
        if record != env.record:
            env = env._replace(record=record)
            number = self.envs(env)
        done = (*world[:4], number)
        yield from self.step(done, nodes, env, site, e.RecordSeen(record))
        if number != world[4] and env.crashes:
            yield (site, "crash after its swap"), self.crash(done, nodes[site], env, site)
        if number != world[4] and env.messages:
            silent = (*world[:4], self._env(number, "messages"))
            spent = self.envs.values[silent[4]]
            for label, after in self.step(silent, nodes, spent, site, e.StoreUnreachable()):
                yield (*label, f"{record} is written"), after
            net: Net = self.nets.values[world[3]]
            entries = (*net.aside, (site, STORE, (request, None)))
            slow = self.nets(net._replace(aside=tuple(sorted(entries, key=repr))))
            undone = (*world[:3], slow, self._env(world[4], "messages"))
            spent = self.envs.values[undone[4]]
            for label, after in self.step(undone, nodes, spent, site, e.StoreUnreachable()):
                yield (*label, f"{record} is put aside"), after

    def accept(self, world: World, node: Node, env: Env, site: int) -> tuple[Any, World]:
        (membership_id, history), *rest = node.acts
        number = world[4]
        common = min(len(history), len(env.committed))
        if history[:common] != env.committed[:common]:
            raise Violation(f"committed steps {env.committed} are lost: {history} is saved")
        if len(history) > common:
            env = env._replace(committed=history)
        if self.rules.admits_act(env.record.membership_id, membership_id):
            if membership_id != env.record.membership_id or site not in env.record.members:
                raise Violation(f"site {site} acts under record {membership_id}, not {env.record}")
            env = env._replace(is_over=env.is_over or len(history) == self.box.steps)
        if env is not self.envs.values[number]:
            number = self.envs(env)
        changed = self.nodes(node._replace(acts=tuple(rest)))
        return (site, "acts", membership_id, history), (
            *world[:site], changed, *world[site + 1 : 4], number,
        )  # fmt: skip

    def tick(self, world: World, nodes: list[Node], env: Env) -> World:
        net, numbers = world[3], list(world[:SITES])
        for site, node in enumerate(nodes):
            if node.state is None:
                continue
            if node.slept >= 0:
                numbers[site] = self.nodes(node._replace(slept=min(node.slept + 1, LEASE)))
                continue
            numbers[site], sends = self.perform(world[site], e.Elapsed(1))
            check_admission(nodes, self.nodes.values[numbers[site]], site, e.Elapsed(1))
            net = self.sent(net, env, nodes, sends)
        return (*numbers, net, world[4])

    def crash(self, world: World, node: Node, env: Env, site: int) -> World:
        return (
            *world[:site], self._dead(node), *world[site + 1 : SITES],
            self._without_messages_of(world[3], site), self._env(world[4], "crashes"),
        )  # fmt: skip

    def _dead(self, node: Node) -> int:
        return self.nodes(Node(None, saved=node.saved))

    def _without_messages_of(self, number: int, site: int) -> int:
        """Return the net after a crash: messages to the site are gone, and states on their way."""
        after = self._changed.get((number, site))
        if after is None:
            net: Net = self.nets.values[number]
            queues = tuple(
                () if site in pair_of(index)[0 if index >= SITES**2 else 1 :] else queue
                for index, queue in enumerate(net.queues)
            )
            aside = tuple(
                (sender, receiver, entry)
                for sender, receiver, entry in net.aside
                if receiver != site and (sender != site or not is_state(entry[0]))
            )
            after = self._changed[number, site] = self.nets(Net(queues, aside))
        return after

    def _turned(self, number: int, site: int) -> int:
        key = ("turn", number, site)
        after = self._changed.get(key)
        if after is None:
            after = self._changed[key] = self.envs(self.envs.values[number]._replace(turn=site))
        return after

    def _env(self, number: int, fault: str, **changes: Any) -> int:
        """Return the environment with one fault of a kind less."""
        key = (number, fault, *changes.items())
        after = self._changed.get(key)
        if after is None:
            env = self.envs.values[number]
            changes |= {fault: getattr(env, fault) - 1, "faults": env.faults - 1}
            if env.faults == 1:  # no more of any kind: states that differ in these alone are one
                changes |= dict.fromkeys(FAULTS, 0)
            after = self._changed[key] = self.envs(env._replace(**changes))
        return after

    def wake(self, world: World, nodes: list[Node], env: Env, site: int) -> World:
        """Let a site see the time and what its guard says before all else."""
        node = nodes[site]
        nodes = [*nodes[:site], node._replace(slept=-1), *nodes[site + 1 :]]
        number, net = self.nodes(nodes[site]), world[3]
        event = e.Elapsed(node.slept) if node.slept else next(notices(nodes, env, site), None)
        while event is not None:
            number, sends = self.perform(number, event)
            net = self.sent(net, env, nodes, sends)
            nodes[site] = self.nodes.values[number]
            event = next(notices(nodes, env, site), None)
        return (*world[:site], number, *world[site + 1 : SITES], net, world[4])

    def faults(
        self, world: World, nodes: list[Node], net: Net, env: Env
    ) -> Iterator[tuple[Any, World]]:
        for site, node in enumerate(nodes):
            if node.state is None:
                if env.returns:
                    fresh = self._returned(site, node.saved)
                    # A new start has new links, on which no earlier request comes.
                    aside = tuple(
                        entry
                        for entry in net.aside
                        if entry[0] != site or not isinstance(entry[2][0], e.JoinRequest)
                    )
                    left = self.nets(net._replace(aside=aside))
                    after = self._env(world[4], "returns")
                    yield (site, "returns"), (
                        *world[:site], fresh, *world[site + 1 : 3], left, after,
                    )  # fmt: skip
                continue
            if env.crashes:
                yield (site, "crashes"), self.crash(world, node, env, site)
            if node.slept >= 0:
                yield (site, "wakes"), self.wake(world, nodes, env, site)
            elif env.pauses and next(notices(nodes, env, site), None) is None:
                # What was noticed before a suspension comes before its end.
                asleep = self.nodes(node._replace(slept=0))
                after = self._env(world[4], "pauses")
                yield (site, "is paused"), (*world[:site], asleep, *world[site + 1 : 4], after)
        for index, queue in enumerate(net.queues):
            for place in range(len(queue)) if self.box.order == "rounds" else ():
                yield from self.lose(world, env, index, place)
        for cut in range(1, len(CUTS)) if env.partitions else ():
            after = self._env(world[4], "partitions", cut=cut)
            queues = tuple(
                () if is_cut(self.envs.values[after], *pair_of(index)) else queue
                for index, queue in enumerate(net.queues)
            )
            yield (CUTS[cut], "is cut"), (*world[:3], self.nets(Net(queues, net.aside)), after)
        # Both sides of a cut count from its begin: both notice it, or none.
        running = [site for site in range(SITES) if nodes[site].state and nodes[site].slept < 0]
        noticed = any(node.state and max(node.state.silence) >= 0 for node in nodes)
        if env.cut and not (
            noticed
            and any(isinstance(n, e.Silent) for site in running for n in notices(nodes, env, site))
        ):
            yield ("the cut ends",), (*world[:4], self.envs(env._replace(cut=0)))
        # An outage is seen by a request alone.
        asks = any(node.request is not None for node in nodes)
        if env.outages and asks:
            after = self._env(world[4], "outages", is_out=True)
            yield ("the store is out",), (*world[:4], after)
        if env.is_out and asks:
            yield ("the store is back",), (*world[:4], self.envs(env._replace(is_out=False)))
        for place, (sender, receiver, (message, handed)) in enumerate(net.aside):
            if receiver == STORE:
                record = self.rules.swap(env.record, message.expected, message.new)
                aside = (*net.aside[:place], *net.aside[place + 1 :])
                after = self.envs(env._replace(record=record))
                yield ("late", message), (*world[:3], self.nets(net._replace(aside=aside)), after)
                continue
            node = nodes[receiver]
            if node.state is not None and node.slept < 0 and not is_cut(env, sender, receiver):
                aside = (*net.aside[:place], *net.aside[place + 1 :])
                left = self.nets(Net(net.queues, aside))
                for label, after in self.step(
                    world, nodes, env, receiver, e.Received(message), handed, net=left
                ):
                    yield ("late", *label), after

    # Invariants.

    def check(self, world: World, nodes: list[Node], env: Env) -> None:
        for site, number in enumerate(world[:SITES]):
            key = (number, world[4])
            permitted = self._permitted.get(key)
            if permitted is None:
                node = nodes[site]
                permitted = self._permitted[key] = (
                    node.state is None
                    or node.slept >= 0
                    or site in env.record.members
                    or not may_act(node.state, self.rules)
                )
            if not permitted:
                raise Violation(f"site {site} may act, and {env.record} is in the store")
            for other in world[:site]:
                agree = self._agree.get((number, other))
                if agree is None:
                    agree = self._agree[number, other] = agrees(
                        nodes[site], self.nodes.values[other]
                    )
                if not agree:
                    raise Violation(f"two members of one record have other sums of a step: {nodes}")

    def is_done(self, world: World) -> bool:
        return self.envs.values[world[4]].is_over

    def is_saved(self, world: World) -> bool:
        """Return True if a member of the record has acted on the last step."""
        states = [self.nodes.values[number].state for number in world[:SITES]]
        record = self.envs.values[world[4]].record
        return self.is_done(world) or any(
            state is not None
            and state.takes_part
            and state.record == record
            and state.committed == self.box.steps
            for state in states
        )

    def may_wait(self, world: World) -> bool:
        """Return True if no progress is promised."""
        nodes = [self.nodes.values[number] for number in world[:SITES]]
        env: Env = self.envs.values[world[4]]
        inside = {
            site
            for site, node in enumerate(nodes)
            if node.state is not None
            and node.state.takes_part
            and not node.state.joining
            and node.slept < 0
            and site in env.record.members
        }
        hear_all = inside == set(env.record.members) and all(
            max(nodes[site].state.silence) < 0 for site in inside
        )
        if not inside:  # the sites begin again when all are back
            all_live = all(node.state is not None and node.slept < 0 for node in nodes)
            return not all_live or bool(env.cut) or env.is_out
        if hear_all and all(nodes[site].state.record == env.record for site in inside):
            return False
        return env.is_out


def is_cut(env: Env, first: int, second: int) -> bool:
    return (min(first, second), max(first, second)) in CUTS[env.cut]


def agrees(first: Node, second: Node) -> bool:
    if first.state is None or second.state is None:
        return True
    if not (first.state.takes_part and second.state.takes_part):
        return True
    if first.state.record.membership_id != second.state.record.membership_id:
        return True
    common = min(len(first.history), len(second.history))
    return first.history[:common] == second.history[:common]


def notices(nodes: list[Node], env: Env, site: int) -> Iterator[Any]:
    """Yield what a site's guard says of the others."""
    state = nodes[site].state
    assert state is not None, "it lives"
    if not state.takes_part:
        return
    for other in state.record.members:
        if other == site:
            continue
        node, age = nodes[other], state.silence[other]
        is_cut_off = is_cut(env, site, other)
        if not is_cut_off and has_ended(node, state.record):
            if age != math.inf:
                yield e.Gone(other)
            continue
        if node.state is None:
            if age < 0:
                yield e.Silent(other)
            continue
        theirs = node.state.record
        is_heard = not is_cut_off and node.slept < NOTICED
        speaks = is_heard and node.slept < 0
        if speaks and theirs is not None and theirs.membership_id > state.record.membership_id:
            yield e.Received(e.Refusal(other, theirs))
        elif is_heard and theirs == state.record and node.state.takes_part:
            is_kept = keeps(node.state, site) and keeps(state, other)
            if not is_kept and age < 0:
                yield e.Silent(other)
            elif is_kept and speaks and age != UNKNOWN:
                counts_back = node.state.silence[site] < 0
                if age >= 0 or counts_back:
                    yield e.Heard(other, counts_back)
        elif not is_heard and age < 0:
            yield e.Silent(other)
    for other in {*state.paused_for, *([] if state.follower is None else [state.follower])}:
        node, is_cut_off = nodes[other], is_cut(env, site, other)
        if not is_cut_off and (node.state is None or node.state.record is None):
            yield e.Gone(other)
        elif other == state.follower and (is_cut_off or node.slept >= NOTICED):
            yield e.Silent(other)


def has_ended(node: Node, record: MembershipRecord) -> bool:
    """Return True if the process that took part under a record has ended; another may run."""
    if node.state is None:
        return True
    return not node.state.takes_part and node.slept < 0 and node.state.record in (None, record)


def held(state: MemberState) -> set[int]:
    """Return the steps whose sums a holder's caller has for its follower."""
    return set(range(state.queued_from, state.applied + 1)) if state.queued_from else set()


def check_follower(before: MemberState, after: MemberState, actions: tuple[Any, ...]) -> None:
    """Check that a site hands over what its caller has alone, and not too much of that."""
    applied = {action.step for action in actions if isinstance(action, e.ApplySums)}
    if not held(after) <= held(before) | applied:
        raise Violation(f"site {after.site} must have sums that it did not keep: {after}")
    if len(held(after)) > after.most_queued + 1:
        raise Violation(f"site {after.site} keeps too many sums: {after}")
    for action in actions:
        if not (isinstance(action, e.SendTo) and isinstance(action.message, e.HandedOver)):
            continue
        step, whole = action.message.step, action.message.whole
        has_state = step == (after.handed if action.site == after.follower else after.applied)
        has_sums = step in held(before) | held(after) | applied | {before.kept, after.kept}
        if not (has_state if whole else has_sums):
            raise Violation(f"site {after.site} hands over what it has not: {action}")


def check_admission(nodes: list[Node], holder: Node, site: int, event: Any) -> None:
    """Check that a site that is to be admitted lacks no more than the last step."""
    swap, before = holder.request, nodes[site]
    is_new = before.request != swap or isinstance(event, e.RecordSeen | e.StoreUnreachable)
    if not (is_new and isinstance(swap, e.SwapRecord)) or (
        isinstance(event, e.Elapsed) and before.state.proposed == swap.new
    ):
        return  # a swap that may have been done is done again, at whatever step
    for admitted in set(swap.new.members) - set(swap.expected.members):
        state = nodes[admitted].state
        follows = state is not None and state.followed == swap.expected.membership_id
        if admitted != site and follows and state.applied < holder.state.applied - 1:
            raise Violation(f"site {admitted} is to be admitted, and is not level: {state}")


def reached(
    before: MemberState, after: MemberState, event: Any, actions: tuple[Any, ...]
) -> Iterator[str]:
    """Yield what a returned site or its holder has done, for tests."""
    is_same = before.record == after.record
    applies = any(isinstance(action, e.ApplySums) for action in actions)
    if not before.takes_part and not after.takes_part and applies:
        yield "a returned site follows"
    if not before.takes_part and after.takes_part and before.followed:
        yield "a returned site is admitted"
    if is_same and before.queued_from and not after.queued_from and after.follower is not None:
        yield "a follower begins again"
    if before.paused < 0 <= after.paused:
        yield "the members pause"
    if before.paused >= 0 and after.paused < 0:
        if not is_same and before.follower in after.record.members:
            yield "a pause ends in an admission"
        if is_same and isinstance(event, e.Elapsed) and before.unasked + 1 < LEASE:
            yield "a pause runs out"
    if any(
        isinstance(action, e.WaitFor) and "returns after" in action.reason for action in actions
    ):
        yield "a returned site waits for another"


class Result(NamedTuple):
    """What an exploration found."""

    states: int
    """Reachable states that were visited."""
    faults: int
    """Every state with so many faults of the box, or fewer, was visited."""
    violation: str | None
    trace: tuple[Any, ...] = ()


def packed(world: World) -> int:
    number = 0
    for part in world:
        number = number << BITS | part
    return number


def unpacked(number: int) -> World:
    mask = (1 << BITS) - 1
    return tuple(number >> BITS * place & mask for place in reversed(range(SITES + 2)))  # type: ignore[return-value]


def explore(
    model: Model, *, most_states: int = sys.maxsize, seconds: float = 1e9, progress: bool = False
) -> Result:
    """Visit reachable states, those with fewer faults first, and look for any without progress.

    Args:
        model: the sites and what can happen to them.
        most_states: end after so many.
        seconds: of processor time, after which it ends.
        progress: print lines on the way.
    """
    begin, box = packed(model.start()), model.box
    parents: dict[int, int] = {begin: begin}
    calm: dict[int, int] = {}
    queues: list[list[int]] = [[] for _ in range(box.faults + 1)]
    queues[0].append(begin)
    deadline, faults = time.process_time() + seconds, -1
    for used, queue in enumerate(queues):
        for number in queue:  # which grows
            if len(calm) >= most_states or time.process_time() > deadline:
                break
            first = True
            try:
                for label, world in model.successors(unpacked(number)):
                    after = packed(world)
                    if first:
                        calm[number] = after if not is_fault(label) else number
                        first = False
                    if after not in parents:
                        parents[after] = number
                        queues[box.faults - model.envs.values[world[4]].faults].append(after)
            except Violation as violation:
                return Result(len(calm), faults, str(violation), trace(model, parents, number))
            calm.setdefault(number, number)
            if progress and len(calm) % 100_000 == 0:
                print(f"{len(calm):,} states, {time.process_time():.0f} s", flush=True)
        else:
            faults = used
            if progress:
                print(f"up to {used} faults: {len(calm):,} states", flush=True)
            continue
        break
    stuck = without_progress(model, calm)
    if stuck is not None:
        return Result(len(calm), faults, "no progress", trace(model, parents, stuck))
    return Result(len(calm), faults, None)


def is_fault(label: Any) -> bool:
    words = ("crash", "returns", "is ", "the ", "wakes", "late", "MembershipRecord")
    parts = label if isinstance(label, tuple) else ()
    return any(isinstance(part, str) and part.startswith(words) for part in parts)


def without_progress(model: Model, calm: dict[int, int]) -> int | None:
    """Return a state from which a fair run without more faults never ends all steps."""
    good: set[int] = set()
    for begin in calm:
        path, on_path, number = [], set(), begin
        while number not in good:
            world = unpacked(number)
            if model.is_saved(world) or number not in calm:
                break
            if number in on_path or calm[number] == number:
                # A cycle or an end, where time changes nothing any more.
                if not model.may_wait(world):
                    return begin
                break
            path.append(number)
            on_path.add(number)
            number = calm[number]
        good.update(path)
        good.add(number)
    return None


def trace(model: Model, parents: dict[int, int], number: int) -> tuple[Any, ...]:
    """List the events from the start to a state."""
    path = [number]
    while parents[path[-1]] != path[-1]:
        path.append(parents[path[-1]])
    path.reverse()
    labels = []
    for before, after in itertools.pairwise(path):
        for label, world in model.successors(unpacked(before)):
            if packed(world) == after:
                labels.append(label)
                break
    return tuple(labels)


def shown(result: Result) -> str:
    """Return a counterexample as a list of events, one a line."""
    lines = [f"{place:3}. {event}" for place, event in enumerate(result.trace, 1)]
    return "\n".join([*lines, f"     {result.violation}"])


def walk(model: Model, seed: int, events: int) -> Result:
    """Take random events, one in ten a fault; a run that ends is followed by another."""
    draw, world, labels = random.Random(seed), model.start(), []
    try:
        for _ in range(events):
            choice = model.drawn(world, draw)
            if choice is None:
                world, labels = model.start(), []
                continue
            labels.append(choice[0])
            world = choice[1]
        if not model.goes_on(world):
            raise Violation("no progress")
    except Violation as violation:
        return Result(0, 0, str(violation), tuple(labels))
    return Result(events, 0, None)


def peak_gibibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in Box()._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--seconds", type=float, default=600)
    arguments = parser.parse_args()
    box = Box(**{name: getattr(arguments, name) for name in Box._fields})
    model = Model(box)
    result = explore(model, seconds=arguments.seconds, progress=True)
    print(*sorted(model.reached), sep=", ")
    print(f"{box}: {result.states:,} states, all with up to {result.faults} faults, ", end="")
    print(f"{time.process_time():.0f} s of one core, {peak_gibibytes():.1f} GiB")
    if result.violation:
        print(shown(result))
    return result.violation is not None


if __name__ == "__main__":
    sys.exit(main())
