"""The name that somebody meant who wrote one that is not there."""

import difflib
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from geojax.errors import UserError

Entry = TypeVar("Entry")

_LONGEST_LIST = 150
"""Most characters of a list in a message, which is one line of less than 500."""

_ALIKE = 0.75
"""Least similarity: with less "tokenizer" would be taken for "optimizer"."""


class ForeignNames(NamedTuple):
    """Names that other software has for keys and values of a config; none of them is accepted."""

    keys: Mapping[str, str]
    """The key that is meant, with a value (key=value) or a remark after a blank if there is one, by
    a name: a dotted key that is wrong in its section, or the last part of one."""
    values: Mapping[str, Mapping[str, str]]
    """Values that are meant, by the dotted key and the name."""

    def key_of(self, key: str) -> str | None:
        """Return the key that is meant by the unknown dotted `key`; None: nobody knows."""
        named = key.casefold().replace("-", "_")
        return self.keys.get(named) or self.keys.get(named.rpartition(".")[2])

    def value_of(self, key: str, value: object) -> str | None:
        """Return the value that is meant by an impossible `value` of a key; None: nobody knows."""
        if not isinstance(value, str):
            return None
        return self.values.get(key, {}).get(value.casefold().replace("_", "-"))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the one of `known` that `name` is most like; None where none is like it.

    A name that begins another, as h100 does h100-sxm, is like it in any case of letters.
    """
    by_case = {each.casefold(): each for each in known}
    given = name.casefold()[:100]
    near = difflib.get_close_matches(given, by_case, n=1, cutoff=_ALIKE)
    if not near and len(given) >= 3:
        near = [each for each in by_case if each.startswith(given) or given.startswith(each)]
    return by_case[near[0]] if near else None


def did_you_mean(name: str, known: Iterable[str], lister: str | None = None) -> str:
    """Return a hint for a message: the nearest of `known`, or as many of them as a line holds.

    A `lister`, a command that lists all of them, is named where the line does not hold all.
    """
    known = list(known)
    if near := nearest(name, known):
        return f"did you mean '{near}'?"
    line = listed(known) or "none"
    cut = lister is not None and line != ", ".join(known)
    return f"there are: {line}" + (f"; {lister} lists all" if cut else "")


def listed(names: Iterable[object], separator: str = ", ", longest: int = _LONGEST_LIST) -> str:
    """Join names for a message, up to `longest` characters, and count the rest; one always stays.

    A single name is cut to that length too.
    """
    texts = [shortened(str(name), longest) for name in names]
    shown, length = 0, 0
    for text in texts:
        length += len(text) + len(separator)
        if shown and length > longest + len(separator):
            break
        shown += 1
    rest = len(texts) - shown
    return separator.join(texts[:shown]) + (f" and {rest} more" if rest else "")


def shortened(text: str, longest: int = 60) -> str:
    """Cut a text that is longer than `longest` characters."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def entry_called(name: str, entries: Mapping[str, Entry], kind: str) -> Entry:
    """Return the entry of a registry of `kind` (optimizer, schedule) by its name.

    Raises:
        UserError: there is none.
    """
    if name not in entries:
        raise UserError(f"no {kind} is called '{shortened(name)}'; choose one of {listed(entries)}")
    return entries[name]
