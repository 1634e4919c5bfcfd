"""The actions of a site in one step, as plain data, made from a pipeline schedule.

A site works through its list from the first action to the last; each of its processes has the same
list. A message that is late delays the action that takes it and changes no order.

    role data, 2 chunks, 2 microbatches, both held at once (the same list at every site)
        F0.0 F0.1 F1.0 F1.1  B0.1 B1.1 Reduce(1)  B0.0 B1.0 Reduce(0) Reduce(scalars)
        Add(1) Add(0) Add(scalars) Apply

    role stage, 1f1b, 2 sites, 2 microbatches
        site 0    F0.0 Send  F1.0 Send  Receive B0.0  Receive B1.0  Reduce(0) .. Apply
        site 1    Receive F0.1 B0.1 Send  Receive F1.1 B1.1 Send  Reduce(1) .. Apply

Additions come last: the reductions of all buckets are under way before any is waited for.

Where a site has several stages, its first stage adds the scalars of all of them. This stage then
exchanges the sum with the first stages of the other sites, and passes the total on inside the site.
There are as many messages as stages, and each sum crosses between sites once.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from geojax.pipeline.rules import requirement
from geojax.pipeline.schedule import Action, Kind, Placement, Schedule

Bucket: TypeAlias = int | Literal["table", "scalars", "site_scalars", "step_scalars"]
"""The content of a sum: a chunk's gradients by its number, the gradients of a tied table that two
sites hold, or the losses and counts. Losses and counts may be summed over the stages of a site, or
over all sites; the first stage of a site has the latter, and other stages add them to nothing."""


class Receive(NamedTuple):
    """Wait for the stream or the cotangent that `action` takes."""

    action: Action
    site: int
    """The sender."""


class Send(NamedTuple):
    """Offer what was just computed to the site that runs `action` on it."""

    action: Action
    site: int
    """The receiver."""


class Reduce(NamedTuple):
    """Sum a bucket inside the site and offer it to other sites."""

    bucket: Bucket
    sites: tuple[int, ...]
    """The other sites that add it; none: it is whole."""
    share: int = 0
    """The share of the batch whose sum it is. In role stage all sites work on the same one."""


class SumPart(NamedTuple):
    """The sum of one share of the batch, or in role stage of one site's layers."""

    share: int
    site: int
    """The site that makes it."""


class Add(NamedTuple):
    """Wait for the other sites' parts of a bucket and add all, in the order of parts."""

    bucket: Bucket
    parts: tuple[SumPart, ...]
    left_out: tuple[int, ...] = ()
    """Shares of the batch that no site computes: zeros take their place."""


class Apply(NamedTuple):
    """Update the state with the sums of all buckets."""


SiteAction: TypeAlias = Action | Receive | Send | Reduce | Add | Apply


class Message(NamedTuple):
    """A message of a step; sender and receiver derive the same one from their lists."""

    kind: Literal[
        "activation", "cotangent", "bucket", "table", "scalars", "site_scalars", "step_scalars"
    ]
    microbatch: int = 0
    chunk: int = 0
    share: int = 0


Shares: TypeAlias = tuple[tuple[int, ...], ...]
"""Shares of the batch that each site computes: its own first, then those of sites that are lost.

A site that is lost has none. The parts of a sum are those of the shares, whichever site makes them,
so that the sum has the same bits. A share that no site computes is left out."""


def own_shares(sites: int) -> Shares:
    """Return the shares while no site is lost."""
    return shares_of_members(sites, range(sites), holder=0, keeps_batch=True)


def shares_of_members(
    sites: int, members: Sequence[int], *, holder: int, keeps_batch: bool
) -> Shares:
    """Divide the batch among the sites that take part: whole shares of others go round in turn.

    Args:
        sites: number of shares.
        members: the sites that take part, ascending.
        holder: the member that gives its state to sites that return. It comes last in each turn.
        keeps_batch: they compute the shares of others; otherwise these are left out.
    """
    lost = [site for site in range(sites) if keeps_batch and site not in members]
    in_turn = [*(site for site in members if site != holder), holder]
    return tuple(
        (site, *lost[in_turn.index(site) :: len(members)]) if site in members else ()
        for site in range(sites)
    )


def most_shares(sites: int) -> int:
    """Return the most shares that a site computes while another one takes part too."""
    two = shares_of_members(sites, range(min(sites, 2)), holder=0, keeps_batch=True)
    return max(map(len, two))


def breadth_first(chunks: int, microbatches: int, held: int) -> Schedule:
    """Order the work of a site whose chunks are all its own, so that buckets leave early.

    The last `held` microbatches run backwards chunk by chunk: a bucket travels during the backward
    of `held` microbatches through all chunks before it. The others run one after the other.

    Args:
        chunks: number of chunks.
        microbatches: number of microbatches.
        held: microbatches whose residuals are held at once.
    """
    assert 1 <= held <= microbatches, f"{held} of {microbatches} microbatches are held"
    order: list[Action] = []
    groups = [[each] for each in range(microbatches - held)]
    for group in [*groups, list(range(microbatches - held, microbatches))]:
        order += [Action(Kind.FORWARD, each, chunk) for each in group for chunk in range(chunks)]
        for chunk in reversed(range(chunks)):
            order += [Action(Kind.BACKWARD, each, chunk) for each in group]
    return Schedule(
        "breadth_first", Placement(1, (0,) * chunks), microbatches, False, (tuple(order),)
    )


def data_actions(schedule: Schedule, site: int, shares: Shares) -> tuple[SiteAction, ...]:
    """List the actions of a site in role data: every site has all chunks, and shares of the batch.

    The microbatches of its second share are numbered on behind those of the first.

    Args:
        schedule: of one stage, for one share.
        site: the site.
        shares: those of each site; one that is lost has no actions.
    """
    assert schedule.placement.stages == 1, "in role data a site has one stage"
    if not shares[site]:
        return ()
    others = tuple(other for other, own in enumerate(shares) if own and other != site)
    actions: list[SiteAction] = []
    for number, share in enumerate(shares[site]):
        for action in _work(schedule, 0, others):
            match action:
                case Reduce():
                    actions.append(action._replace(share=share))
                case Action():
                    offset = number * schedule.microbatches
                    actions.append(action._replace(microbatch=offset + action.microbatch))
        actions.append(Reduce("scalars", others, share))
    parts = tuple(SumPart(share, other) for other in others for share in shares[other])
    reduces = [action for action in actions if isinstance(action, Reduce)]
    computed = {share for own in shares for share in own}
    left_out = tuple(share for share in range(len(shares)) if share not in computed)
    adds = [Add(each.bucket, parts, left_out) for each in reduces if each.share == shares[site][0]]
    return (*actions, *adds, Apply())


def stage_actions(
    schedule: Schedule, site: int, *, tied: bool, stages_per_site: int = 1
) -> tuple[SiteAction, ...]:
    """List the actions of a stage in role stage; with one stage a site it is a site.

    Args:
        schedule: of the stages of all sites.
        site: the stage.
        tied: the first and the last chunk share a table, of whose gradient each makes a part.
        stages_per_site: stages of every site.
    """
    stage_of = schedule.placement.stage_of
    ends = {stage_of[0], stage_of[-1]}
    sums: list[SiteAction] = []
    if tied and site in ends and len(ends) == 2:
        (other,) = ends - {site}
        sums += [Reduce("table", (other,)), Add("table", _parts_of((other,)))]
    # The scalars hold the norm of the gradients, and so come after all of those.
    sums += _scalar_actions(schedule.placement.stages, site, stages_per_site)
    return (*_work(schedule, site, ()), *sums, Apply())


def _scalar_actions(stages: int, stage: int, stages_per_site: int) -> list[SiteAction]:
    """List the actions by which a stage gets the scalars of all stages."""
    first = stage // stages_per_site * stages_per_site
    if stage != first:
        return [Reduce("scalars", (first,)), Add("step_scalars", _parts_of((first,)))]
    elsewhere = tuple(other for other in range(0, stages, stages_per_site) if other != first)
    if stages_per_site == 1:
        return [Reduce("scalars", elsewhere), Add("scalars", _parts_of(elsewhere))]
    others = tuple(range(first + 1, first + stages_per_site))
    return [
        Reduce("scalars", ()),
        Add("scalars", _parts_of(others)),
        Reduce("site_scalars", elsewhere),
        Add("site_scalars", _parts_of(elsewhere)),
        Reduce("step_scalars", others),
    ]


def _parts_of(sites: Iterable[int]) -> tuple[SumPart, ...]:
    """Return the parts of stages that work on the same batch."""
    return tuple(SumPart(0, site) for site in sites)


def forward_actions(placement: Placement, microbatches: int, site: int) -> tuple[SiteAction, ...]:
    """List the actions of a site in role stage that validates: forwards, through all sites.

    Args:
        placement: site s is stage s.
        microbatches: number of microbatches.
        site: the site.
    """
    orders = tuple(
        tuple(
            Action(Kind.FORWARD, microbatch, chunk)
            for microbatch in range(microbatches)
            for chunk in placement.chunks_of(stage)
        )
        for stage in range(placement.stages)
    )
    return tuple(_work(Schedule("forward", placement, microbatches, False, orders), site, ()))


def _work(schedule: Schedule, stage: int, sites: tuple[int, ...]) -> Iterator[SiteAction]:
    """Yield the work of a stage, with its hops to other stages and the reductions of its chunks."""
    stage_of = schedule.placement.stage_of
    reduce_after = _reduce_after(schedule, stage, sites)
    for action in schedule.orders[stage]:
        needed = requirement(schedule, action)
        if needed is not None and stage_of[needed.chunk] != stage:
            yield Receive(action, stage_of[needed.chunk])
        yield action
        following = _following(schedule, action)
        if following is not None and stage_of[following.chunk] != stage:
            yield Send(following, stage_of[following.chunk])
        if action in reduce_after:
            yield reduce_after[action]


def _following(schedule: Schedule, action: Action) -> Action | None:
    """Return the action in another chunk that takes the result; None: there is none."""
    if action.kind is Kind.WEIGHT:
        return None
    chunk = action.chunk + (1 if action.kind is Kind.FORWARD else -1)
    return action._replace(chunk=chunk) if 0 <= chunk < schedule.placement.chunks else None


def _reduce_after(schedule: Schedule, stage: int, sites: tuple[int, ...]) -> dict[Action, Reduce]:
    """Return the reduction of each chunk by the last action that adds to its gradients."""
    last = {}
    for action in schedule.orders[stage]:
        if action.kind is schedule.kinds[-1]:
            last[action.chunk] = action
    by_action = {action: Reduce(chunk, sites) for chunk, action in last.items()}
    return {action: by_action[action] for action in schedule.orders[stage] if action in by_action}


def sent(action: SiteAction) -> Iterator[tuple[int, Message]]:
    """Yield the messages that an action offers, each with its receiver."""
    if isinstance(action, Send):
        yield action.site, _hop(action.action)
    elif isinstance(action, Reduce):
        for site in action.sites:
            yield site, _of_bucket(action.bucket, action.share)


def received(action: SiteAction) -> Iterator[tuple[int, Message]]:
    """Yield the messages that an action waits for, each with its sender."""
    if isinstance(action, Receive):
        yield action.site, _hop(action.action)
    elif isinstance(action, Add):
        for share, site in action.parts:
            yield site, _of_bucket(action.bucket, share)


def _hop(action: Action) -> Message:
    if action.kind is Kind.FORWARD:
        return Message("activation", action.microbatch, action.chunk)
    return Message("cotangent", action.microbatch, action.chunk)


def _of_bucket(bucket: Bucket, share: int) -> Message:
    if isinstance(bucket, str):
        return Message(bucket, share=share)
    return Message("bucket", chunk=bucket, share=share)


def windows(actions: Sequence[Sequence[SiteAction]]) -> dict[tuple[int, int], int]:
    """Return how many messages to fetch ahead from each sender, by (sender, receiver).

    Args:
        actions: the list of each site.
    """
    return {
        (sender, receiver): window
        for receiver in range(len(actions))
        for sender, window in fetched_ahead(actions, receiver).items()
    }


def fetched_ahead(actions: Sequence[Sequence[SiteAction]], receiver: int) -> dict[int, int]:
    """Return how many messages a site fetches ahead from each sender.

    With so many fetches under way, in the order of consumption, all that a sender can have offered
    is being fetched, however slow the receiver is: no offer waits for a fetch that waits for
    another offer. They are counted in a walk through all lists with a receiver as slow as can be.

    Args:
        actions: the list of each site.
        receiver: the site.
    """
    order: dict[int, dict[Message, int]] = {}
    for action in actions[receiver]:
        for sender, message in received(action):
            of_sender = order.setdefault(sender, {})
            of_sender[message] = len(of_sender)
    consumed = dict.fromkeys(order, 0)
    ahead = dict.fromkeys(order, 1)
    position = [0] * len(actions)
    offered: set[tuple[int, int, Message]] = set()
    others = [site for site in range(len(actions)) if site != receiver]

    def advance(site: int) -> bool:
        if position[site] == len(actions[site]):
            return False
        action = actions[site][position[site]]
        if any((sender, site, message) not in offered for sender, message in received(action)):
            return False
        position[site] += 1
        for to, message in sent(action):
            offered.add((site, to, message))
            if to == receiver:
                behind = order[site][message] + 1 - consumed[site]
                ahead[site] = max(ahead[site], behind)
            else:
                others.append(to)  # it may have waited for this
        if site == receiver:
            for sender, _ in received(action):
                consumed[sender] += 1
        return True

    while True:
        while others:
            site = others.pop()
            while advance(site):
                pass
        if not advance(receiver):
            assert position == [len(each) for each in actions], "the lists must be able to finish"
            return ahead
