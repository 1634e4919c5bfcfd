"""The rates of a site whose processes hold different stages, as its first process learns them."""

from geojax.train.islands import site_rates
from geojax.train.islands.site_rates import tell_rates, with_told_rates
from geojax.transport import MeasuredLink


def test_the_first_process_learns_the_rates_of_the_others(monkeypatch):
    notes = {}
    monkeypatch.setattr(site_rates, "publish", notes.__setitem__)
    monkeypatch.setattr(site_rates, "published", lambda folder: notes)
    own = {1: MeasuredLink(0.02), 2: MeasuredLink(0.1, 7e6)}
    assert with_told_rates(own) == own
    for process, rate in ((1, 6e6), (2, None), (1, 9e6)):
        monkeypatch.setattr(site_rates.jax, "process_index", lambda process=process: process)
        tell_rates({1: MeasuredLink(0.03, rate), 2: MeasuredLink(0.2)})
    assert len(notes) == 2
    assert with_told_rates(own) == {1: MeasuredLink(0.02, 9e6), 2: MeasuredLink(0.1, 7e6)}
