"""Data, from text files to the batches of a run.

`prepare` turns files into prepared folders, and a `Corpus` opens the sources of a run's
`DataSettings`. A `Loader` returns the batch of any step, or this process's share of the batch.

Each name is imported from its module when it is first used: a run only reads prepared folders.
"""

from typing import TYPE_CHECKING

from geojax.lazy_names import importer

if TYPE_CHECKING:
    from geojax.data.corpus import Corpus as Corpus
    from geojax.data.corpus import Source as Source
    from geojax.data.loader import Loader as Loader
    from geojax.data.packing import Batch as Batch
    from geojax.data.packing import pack as pack
    from geojax.data.preparation.preparation import prepare as prepare
    from geojax.data.preparation.standard_library import (
        prepare_standard_library as prepare_standard_library,
    )
    from geojax.data.settings import DataSettings as DataSettings
    from geojax.data.settings import PrepareSettings as PrepareSettings
    from geojax.data.settings import PrepareSource as PrepareSource
    from geojax.data.settings import SourceSettings as SourceSettings
    from geojax.data.storage import Prepared as Prepared
    from geojax.data.tokenizer import Tokenizer as Tokenizer

_NAMES = {
    "geojax.data.corpus": "Corpus Source",
    "geojax.data.loader": "Loader",
    "geojax.data.packing": "Batch pack",
    "geojax.data.preparation.preparation": "prepare",
    "geojax.data.settings": "DataSettings PrepareSettings PrepareSource SourceSettings",
    "geojax.data.preparation.standard_library": "prepare_standard_library",
    "geojax.data.storage": "Prepared",
    "geojax.data.tokenizer": "Tokenizer",
}

__getattr__ = importer(__name__, _NAMES)
