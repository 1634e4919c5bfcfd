"""A process of a site runs the programs that any other process of it may have begun."""

from types import SimpleNamespace

import pytest

from geojax.islands.going_on.decisions import Adopt, as_text
from geojax.islands.going_on.following_process import FollowingProcess
from geojax.islands.going_on.site_membership import InterruptedStepError, Surroundings
from geojax.membership.events import ComputeSums
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
