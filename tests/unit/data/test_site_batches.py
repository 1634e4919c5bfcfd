"""The batches of other sites."""

import numpy as np

from geojax.data import Loader
from geojax.data.batch_ramp import BatchRamp
from geojax.data.site_batches import SiteBatches

SITES, BATCH = 2, 8


def opened(corpus, ramp):
    """The batches of all sites, the sites whose loaders are opened, and a loader of all."""
    sites = []

    def loader_of(site):
        sites.append(site)
        own = BATCH // SITES
        sequences = None if site is None else range(site * own, (site + 1) * own)
        return Loader(
            corpus, sequence_length=32, global_batch_size=BATCH, sequences=sequences, ramp=ramp
        )

    return SiteBatches(loader_of), sites, loader_of(None)


def joined(batches):
    return np.concatenate([batch["tokens"] for batch in batches])


def test_sites_have_their_sequences_of_each_batch_again_too(corpus):
    ramp = BatchRamp.constant(BATCH)
    of_sites, sites, whole = opened(corpus, ramp)
    for step in (3, 4, 4, 5, 1):
        batches = [of_sites.training(site, consumed=step * BATCH) for site in range(SITES)]
        np.testing.assert_array_equal(joined(batches), whole.batch(step)["tokens"])
    assert sites == [None, 0, 1]


def test_sites_have_their_sequences_of_each_validation_batch(corpus):
    of_sites, _, whole = opened(corpus, BatchRamp.constant(BATCH))
    (name,) = whole.validation_names
    numbered = list(enumerate(whole.validation(name)))
    for number, batch in (*numbered, *numbered[-1:]):
        batches = [of_sites.validation(site, name=name, number=number) for site in range(SITES)]
        np.testing.assert_array_equal(joined(batches), batch["tokens"])
