"""Objects that live as long as a run, which no collection looks at."""

import gc

from geojax.runtime.garbage import long_lived_apart


def test_collections_leave_out_what_is_there_and_what_is_said():
    first = [[] for _ in range(1000)]
    before = gc.get_freeze_count()
    with long_lived_apart() as leave_apart:
        assert not any(each is first for each in gc.get_objects())
        second = [[] for _ in range(1000)]
        assert any(each is second for each in gc.get_objects())
        leave_apart()
        assert not any(each is second for each in gc.get_objects())
    assert gc.get_freeze_count() == before
    assert any(each is first for each in gc.get_objects())
