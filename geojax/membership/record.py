"""The record of who takes part, and the protocol of the stores that keep it."""

from typing import NamedTuple, Protocol

from geojax.errors import RunError


class MembershipRecord(NamedTuple):
    """Who takes part in a run; a store keeps one of a run."""

    membership_id: int
    """One more at each change, so that it names the record."""
    members: tuple[int, ...]
    """Sites that take part, in ascending order."""
    holder: int
    """The member that evicts others and admits returned sites."""

    def without(self, sites: tuple[int, ...], holder: int) -> "MembershipRecord":
        """Return the next record, without some sites and with another holder."""
        members = tuple(site for site in self.members if site not in sites)
        return MembershipRecord(self.membership_id + 1, members, holder)

    def with_site(self, site: int) -> "MembershipRecord":
        """Return the next record, with one more site."""
        members = tuple(sorted((*self.members, site)))
        return MembershipRecord(self.membership_id + 1, members, self.holder)


class UnreachableStoreError(RunError):
    """The store of the record does not answer; a swap may or may not have been done."""


class RecordStore(Protocol):
    """A place with one record, which all sites of a run reach.

    Each method raises `UnreachableStoreError` where the place does not answer, and `UserError`
    where it holds something else than a record of this run.
    """

    def read(self) -> MembershipRecord | None:
        """Return the record; None: there is none yet."""

    def create(self, record: MembershipRecord) -> MembershipRecord:
        """Write the first record unless there is one, and return the one that is there then."""

    def swap(self, expected: MembershipRecord, new: MembershipRecord) -> MembershipRecord:
        """Replace `expected` by `new`, and return the record that is there then.

        Nothing is written if the store has another record than `expected`.
        """


def swapped(
    current: MembershipRecord, expected: MembershipRecord, new: MembershipRecord
) -> MembershipRecord:
    """Return what compare-and-set leaves in a store that has `current`."""
    return new if current == expected else current
