"""The stages of a site, side by side: each walks through its own list on devices of its own.

A stage that waits for a message holds up no other: the first one walks in the caller's thread, each
other one in a thread of its own. Their devices are disjoint, so the order in which a device gets
its work is that of one stage's list.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax

from geojax.islands.traffic import LinkTraffic
from geojax.islands.values import StepInputs
from geojax.islands.walk import Walk

Made = TypeVar("Made")


class SiteWalks:
    """The walks of one site.

    Args:
        walks: of each stage of the site, in their order.
    """

    def __init__(self, walks: Sequence[Walk]):
        self.walks = walks
        others = max(len(walks) - 1, 1)
        self._threads = ThreadPoolExecutor(others, thread_name_prefix="stage")

    def side_by_side(self, function: Callable[[int, Walk], Made]) -> list[Made]:
        """Return `function` of each stage's number in the site and walk.

        Raises:
            RunError: another site is lost; the error of the stage that failed first.
        """
        failed: list[BaseException] = []

        def run(number: int) -> Made:
            walk = self.walks[number]
            try:
                return function(number, walk)
            except BaseException as error:
                failed.append(error)
                if len(self.walks) > 1:
                    walk.transport.close()  # the stages that wait for this one end too
                raise

        others: list[Future[Made]] = [
            self._threads.submit(run, number) for number in range(1, len(self.walks))
        ]
        try:
            return [run(0), *(other.result() for other in others)]
        except Exception:
            for other in others:
                other.exception()
            raise failed[0] from None

    def step(
        self,
        states: Sequence[Any],
        signals: Sequence[jax.Array],
        inputs: Sequence[StepInputs],
        records: Sequence[list[Any] | None],
    ) -> list[tuple[Any, Any]]:
        """Run one step of all stages; each argument and each result is as `Walk.step` has it."""

        def step(number: int, walk: Walk) -> tuple[Any, Any]:
            return walk.step(states[number], signals[number], inputs[number], records[number])

        return self.side_by_side(step)

    @property
    def sent_bytes(self) -> int:
        """The bytes that the site sends to all others in a step."""
        of_stages = (item for walk in self.walks for item in walk.sent_bytes.items())
        return sum(size for stage, size in of_stages if self._is_elsewhere(stage))

    @property
    def traffic(self) -> Mapping[int, LinkTraffic]:
        """Traffic of the last step with each other site."""
        of_sites: dict[int, list[LinkTraffic]] = collections.defaultdict(list)
        for walk in self.walks:
            for stage, traffic in walk.traffic.items():
                if self._is_elsewhere(stage):
                    of_sites[stage // len(self.walks)].append(traffic)
        stages = len(self.walks)
        return {site: LinkTraffic.of_site(each, stages) for site, each in of_sites.items()}

    def _is_elsewhere(self, stage: int) -> bool:
        own = self.walks[0].transport.site // len(self.walks)
        return stage // len(self.walks) != own
