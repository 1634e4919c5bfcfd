"""A process of a site runs the programs that any other process of it may have begun."""

from types import SimpleNamespace

import pytest

from geojax.islands.going_on.decisions import Adopt, FetchHanded, TakeHanded, as_text
from geojax.islands.going_on.following_process import FollowingProcess
from geojax.islands.going_on.site_membership import InterruptedStepError, Surroundings
from geojax.islands.programs.values import StepSums
from geojax.membership.events import ApplySums, ComputeSums, HandedOver
from geojax.membership.record import MembershipRecord

STEP = 7
RECORDS = [
    MembershipRecord(1, (0, 1, 2), 0),
    MembershipRecord(2, (0, 1), 0),
    MembershipRecord(3, (1,), 1),
]


class Told:
    """A channel to the first process, of which all that it decides comes in one look."""

    own, others = 1, (0,)

    def __init__(self, decisions):
        self._texts = [(0, as_text(decision)) for decision in decisions]

    def received(self):
        """What has come since the last look."""
        texts, self._texts = self._texts, []
        return texts

    def send(self, text):
        """Nothing: nobody reads it."""


def test_it_runs_each_step_that_was_decided_before_it_looked():
    works = [ComputeSums(record, STEP) for record in RECORDS]
    decisions = [Adopt(RECORDS[0]), works[0]]
    for record, work in zip(RECORDS[1:], works[1:], strict=True):
        decisions += [Adopt(record), work]
    transport = SimpleNamespace(site=1, sites=3, links={}, withdraw=lambda membership_id: None)
    channel = Told(decisions)
    process = FollowingProcess(Surroundings(transport, channel, None, None, 8.0, True))
    process.begin(RECORDS[0], sums=None, saved=STEP - 1, last_step=9)
    for decided in works[:-1]:
        work = process.work_on(STEP)
        assert work == decided
        assert process.record == work.record
        with process.at_work(work) as summed:
            assert process.is_interrupted
            with pytest.raises(InterruptedStepError):
                summed(None)
    work = process.work_on(STEP)
    assert work == works[-1]
    with process.at_work(work):
        assert not process.is_interrupted


def test_a_site_that_was_admitted_after_a_step_takes_no_part_in_its_end():
    two, three = MembershipRecord(2, (1, 2), 1), MembershipRecord(3, (0, 1, 2), 1)
    note = HandedOver(2, three, STEP, whole=False)
    decisions = [
        *(Adopt(two), ComputeSums(two, STEP), Adopt(three)),
        *(FetchHanded(1, note), TakeHanded(keeps=False)),
        *(ApplySums(STEP, 3, source=2), ComputeSums(three, STEP + 1)),
    ]
    arrived = SimpleNamespace(arrived=lambda: True, wait=lambda seconds: True, result=lambda: [])
    transport = SimpleNamespace(
        site=1,
        sites=3,
        links={},
        withdraw=lambda membership_id: None,
        fetch=lambda *message: arrived,
    )
    around = Surroundings(transport, Told(decisions), None, None, 8.0, True)
    process = FollowingProcess(around)
    process.begin(two, sums=StepSums([], None), saved=STEP - 1, last_step=9)
    with process.at_work(process.work_on(STEP)):
        assert process.is_interrupted
    assert process.work_on(STEP) == ApplySums(STEP, 3, source=2)
    assert process.record == three
    assert process.taking_part == {1, 2}, "who saves and validates after this step"
    process.work_on(STEP + 1)
    assert process.taking_part == {0, 1, 2}
