"""Rates of the links of a site whose stages have processes of their own.

The process that sends over a cut times the messages there. The first process of the site, which
compares the run with its plan, may hold another stage: so the others tell it their rates.
"""

import json
from collections.abc import Mapping

import jax

from geojax.runtime.key_value_store import publish, published
from geojax.transport import MeasuredLink

_FOLDER = "link_rates"


def tell_rates(measured: Mapping[int, MeasuredLink]) -> None:
    """Tell the first process of the site the rates to other sites that this one has measured."""
    told = [(site, link.bytes_per_second) for site, link in measured.items()]
    publish(f"{_FOLDER}/{jax.process_index()}", json.dumps(told))


def with_told_rates(measured: Mapping[int, MeasuredLink]) -> dict[int, MeasuredLink]:
    """Return the links of the first process with the rates that the others have told last."""
    links = dict(measured)
    for told in published(_FOLDER).values():
        for site, rate in json.loads(told):
            if rate is not None:
                links[site] = links[site]._replace(bytes_per_second=rate)
    return links
