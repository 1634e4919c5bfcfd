"""Data, from text files to the batches of a run.

`prepare` turns files into prepared folders, and a `Corpus` opens the sources of a run's
`DataSettings`. A `Loader` returns the batch of any step, or this process's share of the batch.
"""

from geojax.data.corpus import Corpus, Source
from geojax.data.loader import Loader
from geojax.data.packing import Batch, pack
from geojax.data.prepare import prepare
from geojax.data.settings import DataSettings, PrepareSettings, PrepareSource, SourceSettings
from geojax.data.standard_library import prepare_standard_library
from geojax.data.storage import Prepared
from geojax.data.tokenizer import Tokenizer

__all__ = [
    "Batch",
    "Corpus",
    "DataSettings",
    "Loader",
    "PrepareSettings",
    "PrepareSource",
    "Prepared",
    "Source",
    "SourceSettings",
    "Tokenizer",
    "pack",
    "prepare",
    "prepare_standard_library",
]
