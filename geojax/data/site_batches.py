"""The sequences of other sites, for a site that computes the share of one that is lost."""

import itertools
from collections.abc import Callable, Iterator

from geojax.data.loader import Loader
from geojax.data.packing import Batch


class SiteBatches:
    """The batches of any site, read from the one that is asked for on.

    Args:
        open_loader: opens the loader of a site's share of every batch.
    """

    def __init__(self, open_loader: Callable[[int], Loader]):
        self._open_loader = open_loader
        self._loaders: dict[int, Loader] = {}
        self._training: dict[int, tuple[int, Iterator[Batch]]] = {}
        self._validation: dict[tuple[int, str], tuple[int, Iterator[Batch]]] = {}

    def training(self, site: int, consumed: int) -> Batch:
        """Return a site's sequences of the batch behind the first `consumed` ones."""
        loader = self._loader(site)
        at, batches = self._training.get(site, (None, iter(())))
        if at != consumed:
            batches = loader.iterate(consumed)
        batch = next(batches)
        self._training[site] = consumed + loader.ramp.size_at(consumed), batches
        return batch

    def validation(self, site: int, name: str, number: int) -> Batch:
        """Return a site's sequences of a batch of a validation set, by its number from 0."""
        at, batches = self._validation.get((site, name), (None, iter(())))
        if at != number:
            batches = itertools.islice(self._loader(site).validation(name), number, None)
        batch = next(batches)
        self._validation[site, name] = number + 1, batches
        return batch

    def _loader(self, site: int) -> Loader:
        if site not in self._loaders:
            self._loaders[site] = self._open_loader(site)
        return self._loaders[site]
