"""Interface of a text that a run reads: a prepared folder, or files of Megatron-LM."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from geojax.data.packing import Window
from geojax.data.storage import SplitName, StoredShard, TextDescription
from geojax.data.tokenizer import Tokenizer


class TokenizedText(Protocol):
    """Tokens of training documents and of held-out ones, each split one long sequence."""

    tokenizer: Tokenizer
    tokenizer_file: Path
    """The `tokenizer.json`; a chat template may lie beside it."""

    @property
    def fingerprint(self) -> str:
        """Hash that is equal for equal tokens and tokenizers, wherever they lie."""

    @property
    def description(self) -> TextDescription:
        """The text as a person wants to know it."""

    def token_count(self, split: SplitName) -> int:
        """Return the number of tokens of a split; 0: the text has no such split."""

    def window(self, split: SplitName, start: int, stop: int) -> Window:
        """Return tokens `start` to `stop` of a split.

        Raises:
            UserError: they cannot be read, or a value is no token.
        """

    def shards(self) -> Iterator[StoredShard]:
        """Yield the files that have checksums to be verified."""

    def check_ends(self) -> None:
        """Check the first and the last token of each split.

        Raises:
            UserError: they are not those of documents of this tokenizer.
        """
