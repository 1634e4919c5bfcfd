"""Hellos that the rendezvous ignored, counted by address for the message of its time-out."""

import collections

# Addresses that are remembered; those that come later are counted together.
_MOST_ADDRESSES = 1024
_NAMED_ADDRESSES = 2
_ELSEWHERE = "elsewhere"

OTHER_KEY, UNSIGNED = "with another key", "without a signature"
"""Reasons for which a hello is ignored."""


class IgnoredHellos:
    """Numbers of ignored hellos by reason and address."""

    def __init__(self) -> None:
        self._counts: dict[str, collections.Counter[str]] = {
            reason: collections.Counter() for reason in (OTHER_KEY, UNSIGNED)
        }

    def add(self, reason: str, address: str) -> None:
        """Count a hello that came from `address` and was ignored."""
        counts = self._counts[reason]
        if address not in counts and len(counts) >= _MOST_ADDRESSES:
            address = _ELSEWHERE
        counts[address] += 1

    def sentence(self) -> str:
        """Return what came and was ignored: "3 hellos with another key came from 10.0.0.7"."""
        return "; ".join(_sentence(*each) for each in self._counts.items() if each[1])


def _sentence(reason: str, counts: collections.Counter[str]) -> str:
    named = counts.most_common(_NAMED_ADDRESSES)
    (address, first), *others = named
    hellos = "1 hello" if first == 1 else f"{first} hellos"
    text = f"{hellos} {reason} came from {address}"
    text += "".join(f", {count} from {where}" for where, count in others)
    if more := counts.total() - sum(count for _, count in named):
        text += f", {more} from {len(counts) - len(named)} other addresses"
    return text
