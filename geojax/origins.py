"""The place of each value of a config: a line of a file, or an option of the command line."""

import dataclasses
from typing import NamedTuple, TypeAlias

KeyPath: TypeAlias = tuple[str, ...]
"""Keys and list indices on the way to a value."""


class ValuePlace(NamedTuple):
    """A place that a value was written at."""

    source: str
    """A file, or an option such as --optimizer.weight_decay."""
    line: int | None = None
    """Line of the file, from 1; None: an option, or the whole file."""

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclasses.dataclass(frozen=True)
class Origins:
    """The places of a config's values, by their key paths."""

    source: str
    """Name of the whole config, where a value has no place of its own."""
    places: dict[KeyPath, ValuePlace] = dataclasses.field(default_factory=dict)

    def of(self, path: KeyPath) -> ValuePlace:
        """Return the place of the value at `path`, or of the nearest group around it."""
        for length in range(len(path), 0, -1):
            if (place := self.places.get(path[:length])) is not None:
                return place
        return ValuePlace(self.source)

    def replace(self, path: KeyPath, place: ValuePlace) -> None:
        """Note that the value at `path`, with all below, was written at `place`."""
        for known in [known for known in self.places if known[: len(path)] == path]:
            del self.places[known]
        self.places[path] = place
