"""The stages of a process, side by side: each walks through its own list on devices of its own.

A stage that waits for a message holds up no other: the first one walks in the caller's thread, each
other one in a thread of its own. Their devices are disjoint, so the order in which a device gets
its work is that of one stage's list. A stage in several processes is the only one of each.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from geojax.islands.actions import received, sent
from geojax.islands.traffic import LinkTraffic
from geojax.islands.walk import Walk

Made = TypeVar("Made")


class SiteWalks:
    """The walks of one process.

    Args:
        walks: of each stage that the process holds, or holds a part of, in their order.
        stages: stages of every site.
    """

    def __init__(self, walks: Sequence[Walk], stages: int):
        self.walks, self._stages = walks, stages
        others = max(len(walks) - 1, 1)
        self._threads = ThreadPoolExecutor(others, thread_name_prefix="stage")

    def side_by_side(self, function: Callable[[int, Walk], Made]) -> list[Made]:
        """Return `function` of each stage's number in the process and walk.

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

    @property
    def numbers(self) -> list[int]:
        """The number of each stage in its site."""
        return [walk.transport.site % self._stages for walk in self.walks]

    @property
    def link_bytes(self) -> Mapping[int, np.ndarray]:
        """Bytes of a step of each stage, by its number in the site.

        An array [sites, 2] has those to and from each other site.
        """
        made = {}
        for number, walk in zip(self.numbers, self.walks, strict=True):
            sites = walk.transport.sites // self._stages
            made[number] = np.zeros((sites, 2), np.int64)
            for way, messages in enumerate((sent, received)):
                for stage, size in walk.message_bytes(messages).items():
                    if self._is_elsewhere(stage):
                        made[number][stage // self._stages, way] += size
        return made

    @property
    def traffic(self) -> Mapping[int, LinkTraffic]:
        """Traffic of the last step with each other site, but for its bytes."""
        of_sites: dict[int, list[LinkTraffic]] = collections.defaultdict(list)
        for walk in self.walks:
            for stage, traffic in walk.traffic.items():
                if self._is_elsewhere(stage):
                    of_sites[stage // self._stages].append(traffic)
        stages = len(self.walks)
        return {site: LinkTraffic.of_process(each, stages) for site, each in of_sites.items()}

    def _is_elsewhere(self, stage: int) -> bool:
        return stage // self._stages != self.walks[0].transport.site // self._stages
