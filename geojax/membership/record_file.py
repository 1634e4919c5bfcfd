"""The record of who takes part as the bytes of a file or an object."""

import json
from typing import Any, NoReturn, TypeGuard

from geojax.errors import UserError
from geojax.json_file import shown
from geojax.membership.record import MembershipRecord

_FORMAT = "geojax-membership-1"
MOST_BYTES = 1 << 16
"""Largest file or object that a store reads as a record."""


def encode_record(record: MembershipRecord, run: str) -> bytes:
    """Return a record of the run named `run` as bytes."""
    return json.dumps({"format": _FORMAT, "run": run, **record._asdict()}).encode() + b"\n"


def decode_record(content: bytes, run: str, place: str) -> MembershipRecord:
    """Read a record of the run named `run`.

    Args:
        content: the bytes.
        run: name of the run.
        place: path or URL of the bytes, for errors.

    Raises:
        UserError: the bytes are something else than a record of this run.
    """
    values = _values(content, place)

    def refuse(key: str, right: str) -> NoReturn:
        raise UserError(f"{place}: {key} is {shown(values.get(key))}; it must be {right}")

    membership_id, holder = values.get("membership_id"), values.get("holder")
    members = values.get("members")
    if values.get("format") != _FORMAT:
        refuse("format", f'"{_FORMAT}"')
    if values.get("run") != run:
        refuse("run", f"{run!r}, or give this run another place")
    if not _is_number(membership_id) or membership_id < 1:
        refuse("membership_id", "an integer from 1 on")
    if (
        not isinstance(members, list)
        or not members
        or not all(_is_number(site) and site >= 0 for site in members)
        or members != sorted(set(members))
    ):
        refuse("members", "numbers of sites in ascending order")
    if not _is_number(holder) or holder not in members:
        refuse("holder", "one of its members")
    return MembershipRecord(membership_id, tuple(members), holder)


def _values(content: bytes, place: str) -> dict[str, Any]:
    right = "it must be a record of who takes part, or move it away"
    if len(content) > MOST_BYTES:
        raise UserError(f"{place}: over {MOST_BYTES:,} bytes; {right}")
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        raise UserError(f"{place}: not JSON, or not whole; {right}") from None
    if not isinstance(values, dict):
        raise UserError(f"{place}: no JSON object; {right}")
    return values


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
