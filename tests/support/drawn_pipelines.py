"""Random pipelines with slow cuts."""

from geojax.pipeline import Costs, Hop


def drawn_costs(generator, stages, *, cuts, periods):
    """Equal stages; up to `cuts` hops between sites of up to `periods` times f + b."""
    forward, backward = generator.uniform(0.5, 2), generator.uniform(0.5, 3)
    hops = [Hop()] * (stages - 1)
    most = min(cuts, stages - 1)
    for cut in generator.sample(range(stages - 1), generator.randint(1, most)):
        hops[cut] = Hop(generator.uniform(0, periods) * (forward + backward), 0.0, f"cut {cut}")
    return Costs((forward,) * stages, (backward,) * stages, (0.0,) * stages, tuple(hops))


def drawn_under_a_limit(generator):
    """Microbatches, costs, and a limit from half of 1F1B's memory to twice it and more."""
    stages = generator.randint(2, 12)
    microbatches = generator.randint(stages, 96)
    costs = drawn_costs(generator, stages, cuts=3, periods=6)
    return microbatches, costs, generator.randint(max(1, stages // 2), 2 * stages + 4)


def period_of(costs):
    """f + b."""
    return costs.forward[0] + costs.backward[0] + costs.weight[0]


def latency_of(costs):
    """The hops of all stages together, in seconds."""
    return sum(hop.seconds for hop in costs.hops)


def littles_law(microbatches, costs, limit):
    """(m - 1) max(f + b, (p (f + b) + 2 sum H) / M) + p (f + b) + 2 sum H."""
    way = len(costs.forward) * period_of(costs) + 2 * latency_of(costs)
    return (microbatches - 1) * max(period_of(costs), way / limit) + way


def lower_bound(microbatches, costs):
    """(m + p - 1)(f + b) + 2 sum H: the least where a backward is not split."""
    rounds = microbatches + len(costs.forward) - 1
    return rounds * period_of(costs) + 2 * latency_of(costs)


def hard_pipelines():
    """Microbatches, costs, a limit just above the stages, and the seconds of the best order that
    prefers backwards; one that prefers forwards is more than a sixth faster."""
    slow_cuts = (Hop(), Hop(4.7, 0.0, "cut 1"), Hop(6.0, 0.0, "cut 2"))
    yield 17, _whole_backwards((2.5, 1.4, 2.4, 1.5), slow_cuts), 5, 235.2
    one_cut = (*[Hop()] * 3, Hop(6.5, 0.0, "cut"), *[Hop()] * 2)
    yield 18, _whole_backwards((2.6, 2.3, 1.5, 1.3, 1.0, 1.0, 1.2), one_cut), 8, 198.0


def _whole_backwards(forward, hops):
    """Costs of backwards that take twice their forwards and are not split."""
    backward = tuple(2 * seconds for seconds in forward)
    return Costs(forward, backward, (0.0,) * len(forward), hops)
