"""A process of geojax whose site is a JAX runtime of its own: the step of `dc.join: islands`."""

import dataclasses
import functools
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import jax
import yaml

from geojax import runtime
from geojax.cache import cache_folder
from geojax.islands.island_plan import island_plan, make_site_mesh, sequences_of_site
from geojax.job.island_env import IslandSettings
from geojax.pipeline import simulate
from geojax.pipeline.simulation.costs import Hop
from geojax.planner.measured_timeline import draw
from geojax.planner.resolve.pipeline_plan import costs_of_stages
from geojax.planner.resolve.resolve import resolve
from geojax.planner.resolve.site_schedule import event_schedule
from geojax.step.plan import SIGNALS
from geojax.train.islands.island_run import IslandRun
from geojax.train.joined_sites import joined_sites
from geojax.transport import MessageKey, Transport
from wan_sides.blocking import BlockingReceives
from wan_sides.bound import Departure
from wan_sides.geojax_side import run_config
from wan_sides.jax_process import COORDINATOR_PORT, PATIENCE_SECONDS
from wan_sides.serving import own_work, serve, take_steps
from wan_sides.work import CORE_FLOPS_PER_SECOND, SITES, batch

WATCHED_STEPS = 3
"""Steps before the first one that counts, of whose fastest the messages' departures are told."""


class Watched:
    """A transport that notes when the messages that it offers are computed."""

    def __init__(self, transport: Transport):
        self._transport = transport
        self._clock = ThreadPoolExecutor(1)  # messages are computed in the order of their offers
        self._start = time.perf_counter()
        self._noted: list[Future[Departure]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def offer(self, receiver: int, key: MessageKey, arrays: Sequence[jax.Array]) -> None:
        self._transport.offer(receiver, key, arrays)
        self._noted.append(self._clock.submit(self._departure, arrays))

    def _departure(self, arrays: Sequence[jax.Array]) -> Departure:
        jax.block_until_ready(arrays)
        seconds = time.perf_counter() - self._start
        return Departure(seconds, float(sum(array.nbytes for array in arrays)))

    def departures(self) -> list[Departure]:
        """The messages since the start, in their order."""
        return [each.result() for each in self._noted]


def topology_file(link: dict[str, Any], devices: int) -> str:
    """A file that describes the sites and their link, by which orders of work are chosen.

    Args:
        link: settings of the long link.
        devices: devices of a site, which share its core.
    """
    site = {
        "hosts": 1,
        "accelerators_per_host": devices,
        "accelerator": {
            "name": "core",
            "peak_flops_per_second": {"float32": CORE_FLOPS_PER_SECOND / devices},
        },
    }
    described = {
        "sites": [{"name": name, **site} for name in SITES],
        "links": [
            {
                "sites": list(SITES),
                "round_trip_seconds": link["round_trip_seconds"],
                "bytes_per_second": link["bytes_per_second"],
            }
        ],
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as file:
        yaml.safe_dump(described, file)
    return file.name


class Worker:
    def start(self) -> dict[str, Any]:
        work = own_work()
        site = work["process"]
        here = runtime.ProcessSettings(
            process_count=1,
            site=work["site"],
            simulated_devices=work["devices"],
            heartbeat_timeout_seconds=PATIENCE_SECONDS,
        )
        runtime.start(here)
        runtime.enable_compilation_cache(cache_folder() / "xla")
        settings = work["settings"] | {"topology": topology_file(work["link"], work["devices"])}
        config = run_config(settings, work["repeats"])
        step = resolve(config, config.load_topology(), config.mesh.dc * jax.devices())
        plan = island_plan(config, step.layout, make_site_mesh(config))
        place = IslandSettings(
            site=SITES[site],
            sites=SITES,
            coordinators=(f"{work['coordinator']}:{COORDINATOR_PORT}",),
            key="benchmark-of-islands",
        )
        self.joined = ExitStack()  # the harness ends the process
        joined = self.joined.enter_context(joined_sites(config, step, plan, place, here, {}))
        self.run = IslandRun.build(config, step, plan, joined.transport, draw)
        self.blocking = work["blocking"]
        if self.blocking:
            for walk in self.run.stages.walks:
                walk.transport = BlockingReceives(walk.transport)
        rows = sequences_of_site(config, plan, site)
        self.batch = {name: values[rows] for name, values in batch(work["repeats"]).items()}
        if config.dc.role == "stage":
            told = {"hop_bytes": self.run.stages.walks[0].programs.hop_bytes}
        else:
            seconds, departures = self._watched_step()
            told = {"step_seconds": seconds, "departures": departures}
        self.state = self.run.initial_state()
        sent = self.run.links.sent_bytes
        assert sent is not None, "sites exchange messages"
        # The other site sends as much: the same buckets, or a cotangent for every stream.
        return {"formula_bytes": 2 * sent, "versions": {"jax": jax.__version__}} | told

    def _watched_step(self) -> tuple[float, list[Departure]]:
        """Seconds of a step over the unshaped link, and the messages that leave in it."""
        self.state = self.run.initial_state()
        self.one_step()  # compiles
        (walk,) = self.run.stages.walks
        transport = walk.transport
        watched = []
        for _ in range(WATCHED_STEPS):
            walk.transport = Watched(transport)
            start = time.perf_counter()
            self.one_step()
            watched.append((time.perf_counter() - start, walk.transport.departures()))
        walk.transport = transport
        return min(watched)

    def one_step(self) -> float:
        made = self.run.step(self.state, self.batch, dict.fromkeys(SIGNALS, False))
        self.state, metrics = jax.block_until_ready(made)
        return float(metrics["loss"])

    def steps(self, count: int) -> dict[str, Any]:
        taken = take_steps(self.one_step, count)
        (link,) = self.run.stages.traffic.values()
        return taken | {"waits": link.wait_seconds}

    def simulated_seconds(self, plain_seconds: float) -> float:
        """Seconds of a step over the long link, as the event-driven simulator has them.

        Stages share out a step over the plain link by their FLOPs, and the core of their site.

        Args:
            plain_seconds: of a step over the plain link.
        """
        config = self.run.config
        schedule, costs = event_schedule(config), costs_of_stages(config)
        run = functools.partial(
            simulate,
            schedule,
            late_receives=self.blocking,
            stages_per_device=config.mesh.stage,
        )
        factor = plain_seconds / run(costs.inside_sites).seconds
        if self.blocking:  # a pull that is not made ahead asks first
            costs = dataclasses.replace(costs, hops=tuple(map(_asked_for, costs.hops)))
        forward, backward, weight = (
            tuple(factor * each for each in seconds)
            for seconds in (costs.forward, costs.backward, costs.weight)
        )
        return run(
            dataclasses.replace(costs, forward=forward, backward=backward, weight=weight)
        ).seconds


def _asked_for(hop: Hop) -> Hop:
    return hop if hop.link is None else dataclasses.replace(hop, latency=2 * hop.latency)


if __name__ == "__main__":
    worker = Worker()
    handlers = (worker.start, worker.steps, worker.simulated_seconds)
    serve({handler.__name__: handler for handler in handlers})
