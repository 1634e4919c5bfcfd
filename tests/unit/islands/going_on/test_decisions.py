"""Decisions and reports travel between the processes of a site as text."""

import pytest

from geojax.errors import RunError
from geojax.islands.going_on.decisions import (
    Adopt,
    Agreed,
    Answered,
    DropHanded,
    EndReturn,
    Fence,
    FetchHanded,
    HandedCame,
    HandOver,
    PartWith,
    SeenLink,
    TakeHanded,
    TakeUp,
    as_text,
    decision_of,
    report_of,
)
from geojax.membership.events import (
    ApplySums,
    ComputeSums,
    HandedOver,
    ReleaseSums,
    SumsReady,
    TakeState,
)
from geojax.membership.record import MembershipRecord

RECORD = MembershipRecord(3, (0, 2), 2)
NOTE = HandedOver(2, RECORD, 7, whole=True)
DECISIONS = [
    Adopt(RECORD),
    Agreed(4, (0, 2)),
    ApplySums(7, 3, None),
    ApplySums(7, 3, 2),
    ComputeSums(RECORD, 8),
    DropHanded(),
    EndReturn(7),
    Fence('the run goes on without site "west"'),
    FetchHanded(5, NOTE),
    HandOver(1, NOTE, is_member=False),
    PartWith(1),
    ReleaseSums(7),
    TakeHanded(keeps=True),
    TakeState(7),
    TakeUp(1, 2, (("host", "an endpoint"), ("other", "another"))),
]
REPORTS = [
    Answered(4, ()),
    HandedCame(5),
    SeenLink(1, 0, "it has ended with an error", is_silent=False),
    SeenLink(1, 2, None, is_silent=True),
    SumsReady(3, 8),
]


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda each: type(each).__name__)
def test_a_decision_is_read_as_it_was_made(decision):
    read = decision_of(as_text(decision))
    assert read == decision
    assert type(read) is type(decision)


@pytest.mark.parametrize("report", REPORTS, ids=lambda each: type(each).__name__)
def test_a_report_is_read_as_it_was_made(report):
    read = report_of(as_text(report))
    assert read == report
    assert type(read) is type(report)


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"Path":["x"]}', '{"PartWith":[]}', "[" * 100_000, '"PartWith"']
)
def test_another_text_is_refused_in_one_line(text):
    for read in (decision_of, report_of):
        with pytest.raises(RunError, match="a process of this site sends what is none"):
            read(text)


def test_a_report_is_no_decision():
    with pytest.raises(RunError):
        decision_of(as_text(HandedCame(5)))
