"""Likelihood of a run's held-out text, or of other prepared text."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from geojax.data import Batch, Corpus, DataSettings, Prepared, Tokenizer
from geojax.data.preparation.standard_library import open_standard_library
from geojax.data.storage import TRAIN, VALIDATION, SplitName
from geojax.data.tokenized_text import TokenizedText
from geojax.data.windows import SequenceWindows, batches_in_order
from geojax.errors import UserError
from geojax.inference.likelihood import Likelihood, text_likelihood
from geojax.saved_runs.saved_run import SavedRun, Serving
from geojax.settings import validate


class Text(NamedTuple):
    """A split of a tokenized text to be judged."""

    name: str
    tokenized: TokenizedText
    split: SplitName

    @property
    def tokens(self) -> int:
        """The number of its tokens."""
        return self.tokenized.token_count(self.split)


def held_out_texts(run: SavedRun) -> list[Text]:
    """Return the held-out part of each source of a run.

    Raises:
        UserError: a source is not there, or none holds anything out.
    """
    corpus = Corpus.open(validate(DataSettings, run.config["data"], "data"), open_standard_library)
    texts = [Text(source.name, source.text, VALIDATION) for source in corpus.sources]
    texts = [text for text in texts if text.tokens > 1]
    if not texts:
        raise UserError("geojax evaluate: the run's data hold nothing out; name data with --data")
    return texts


def prepared_text(folder: Path) -> Text:
    """Return the held-out part of a prepared folder, or all of it where it holds nothing out.

    Raises:
        UserError: the folder is not prepared, or is empty.
    """
    prepared = Prepared(folder)
    for split in (VALIDATION, TRAIN):
        text = Text(str(folder), prepared, split)
        if text.tokens > 1:
            return text
    raise UserError(f"{folder}: holds no text")


def require_tokenizer(texts: Sequence[Text], tokenizer: Tokenizer) -> None:
    """Raise a UserError if a text was prepared with another tokenizer than the run's."""
    for text in texts:
        if text.tokenized.tokenizer.fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"{text.name}: was prepared with another tokenizer than the run's; prepare it with "
                "--tokenizer, the run's tokenizer.json"
            )


def judge(
    serving: Serving,
    texts: Sequence[Text],
    *,
    batch_size: int,
    most_sequences: int | None = None,
    log: Callable[[str], None] = print,
) -> dict[str, Likelihood]:
    """Return the likelihood of each text, in packed sequences as the run was trained on.

    With the run's `evaluation.sequences` it is the validation loss that the run logged.

    Args:
        serving: the run and its model.
        texts: the texts, with the run's tokenizer.
        batch_size: sequences that are computed together.
        most_sequences: most sequences of a text, evenly spaced; None: all of it.
        log: shows a line to the user.
    """
    ranks = serving.model.ranks
    return {
        text.name: text_likelihood(
            serving.model,
            _batches(text, serving.run, math.ceil(batch_size / ranks) * ranks, most_sequences, log),
        )
        for text in texts
    }


def _batches(
    text: Text, run: SavedRun, size: int, most: int | None, log: Callable[[str], None]
) -> Iterator[Batch]:
    """Yield the batches of a text, with a line for every tenth of it."""
    length = run.config["batch"]["sequence_length"]
    windows = SequenceWindows(text.tokenized, text.split, length)
    sequences = min(windows.with_partial, most or windows.with_partial)
    told = 0
    batches = batches_in_order(windows, global_batch_size=size, most_sequences=most)
    for number, batch in enumerate(batches):
        if (tenth := 10 * number * size // sequences) > told:
            log(f"{text.name}: {number * size} of {sequences} sequences")
            told = tenth
        yield batch
