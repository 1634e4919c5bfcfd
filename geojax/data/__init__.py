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
    from geojax.data.preparation import prepare as prepare
    from geojax.data.settings import DataSettings as DataSettings
    from geojax.data.settings import PrepareSettings as PrepareSettings
    from geojax.data.settings import PrepareSource as PrepareSource
    from geojax.data.settings import SourceSettings as SourceSettings
    from geojax.data.standard_library import prepare_standard_library as prepare_standard_library
    from geojax.data.storage import Prepared as Prepared
    from geojax.data.tokenizer import Tokenizer as Tokenizer

_MODULES = {
    "Batch": "geojax.data.packing",
    "Corpus": "geojax.data.corpus",
    "DataSettings": "geojax.data.settings",
    "Loader": "geojax.data.loader",
    "PrepareSettings": "geojax.data.settings",
    "PrepareSource": "geojax.data.settings",
    "Prepared": "geojax.data.storage",
    "Source": "geojax.data.corpus",
    "SourceSettings": "geojax.data.settings",
    "Tokenizer": "geojax.data.tokenizer",
    "pack": "geojax.data.packing",
    "prepare": "geojax.data.preparation",
    "prepare_standard_library": "geojax.data.standard_library",
}

__getattr__ = importer(__name__, _MODULES)
