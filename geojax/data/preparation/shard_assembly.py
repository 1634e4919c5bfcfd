"""The shards of a folder that is being prepared, assembled from the tokens of parts.

    shards.json     the shards that are whole

An interrupted assembly goes on behind the last whole shard. The values of a part stay in their
files until all of them are in whole shards.
"""

import contextlib
import json
from pathlib import Path

import numpy as np

from geojax.data.preparation.file_tokens import Counts
from geojax.data.preparation.part_tokens import PartProgress, values_file
from geojax.data.storage import SPLITS, Shard, SplitName, SplitWriter, token_dtype, write_manifest
from geojax.data.tokenizer import Tokenizer
from geojax.paths import write_atomically

_SHARDS = "shards.json"
_BLOCK = 1 << 22


class ShardAssembly:
    """Appends whole parts to the shards of both splits, in the order of the parts."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, *, marked: bool) -> None:
        """Go on behind the whole shards of `folder`; `marked` values are those of conversations."""
        self._folder, self._tokenizer, self._marked = folder, tokenizer, marked
        self.dtype = token_dtype(tokenizer.vocabulary_size, marked=marked)
        """Dtype of the shards."""
        self.counts = Counts()
        """Sums over the appended parts."""
        self._writers: dict[SplitName, SplitWriter] = {
            split: SplitWriter(
                folder, split, self.dtype, shards=shards, on_shard=self._keep_whole_shards
            )
            for split, shards in self._whole_shards().items()
        }
        self._appended = dict.fromkeys(SPLITS, 0)
        self._waiting: dict[SplitName, list[tuple[int, Path]]] = {split: [] for split in SPLITS}

    def __enter__(self) -> "ShardAssembly":
        self._stack = contextlib.ExitStack()
        for writer in self._writers.values():
            self._stack.enter_context(writer)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def append(self, number: int, progress: PartProgress) -> None:
        """Append a part that is whole, but for values that whole shards hold."""
        self.counts.add(progress.counts)
        for split, writer in self._writers.items():
            path = values_file(self._folder, number, split)
            begin = self._appended[split]
            end = begin + progress.values[split]
            self._appended[split] = end
            self._waiting[split].append((end, path))
            if begin < end and writer.tokens < end:
                with path.open("rb") as file:
                    file.seek(max(0, writer.tokens - begin) * np.dtype(self.dtype).itemsize)
                    while len(values := np.fromfile(file, self.dtype, _BLOCK)):
                        writer.append(values)
            self._remove_appended(split)

    def finish(self) -> None:
        """Write the last shards and the manifest, and remove all else."""
        documents = self.counts.documents
        splits = {split: writer.finish(documents[split]) for split, writer in self._writers.items()}
        write_manifest(
            self._folder,
            self._tokenizer,
            splits,
            self.counts.text_bytes,
            text_tokens=self.counts.text_tokens,
            marked=self._marked,
        )
        self.remove_parts()

    def remove_parts(self) -> None:
        """Remove what only an interrupted preparation needs."""
        for path in (*self._folder.glob("part-*"), self._folder / _SHARDS):
            path.unlink(missing_ok=True)

    def _whole_shards(self) -> dict[SplitName, list[Shard]]:
        try:
            content = json.loads((self._folder / _SHARDS).read_text())
        except FileNotFoundError:
            return {split: [] for split in SPLITS}
        return {split: [Shard.model_validate(each) for each in content[split]] for split in SPLITS}

    def _keep_whole_shards(self) -> None:
        content = {
            split: [shard.model_dump() for shard in writer.shards]
            for split, writer in self._writers.items()
        }
        write_atomically(self._folder / _SHARDS, json.dumps(content))

    def _remove_appended(self, split: SplitName) -> None:
        """Remove the files of parts whose values are all in whole shards."""
        waiting = self._waiting[split]
        while waiting and waiting[0][0] <= self._writers[split].tokens:
            waiting.pop(0)[1].unlink(missing_ok=True)
