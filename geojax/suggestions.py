"""The name that somebody meant who wrote one that is not there."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

from geojax.errors import UserError

Entry = TypeVar("Entry")

_ALIKE = 0.75
"""Least similarity: with less "tokenizer" would be taken for "optimizer"."""


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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint for a message: the nearest of `known`, or all of them."""
    known = list(known)
    near = nearest(name, known)
    return f"did you mean '{near}'?" if near else f"there are: {', '.join(known) or 'none'}"


def entry_called(name: str, entries: Mapping[str, Entry], kind: str) -> Entry:
    """Return the entry of a registry of `kind` (optimizer, schedule) by its name.

    Raises:
        UserError: there is none.
    """
    if name not in entries:
        raise UserError(f"no {kind} is called '{name}'; choose one of {', '.join(entries)}")
    return entries[name]
