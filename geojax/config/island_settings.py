"""The settings of islands: what becomes of a run whose site is lost."""

from typing import Annotated, Literal

import pydantic

from geojax.membership.member_state import JOIN_PAUSE_SECONDS
from geojax.paths import ResolvedPath
from geojax.settings import Settings


class LeaseSettings(Settings):
    """The record of the sites that take part in a run; a site that is silent for
    `GEOJAX_HEARTBEAT_TIMEOUT` is taken out of it."""

    path: ResolvedPath | None = None
    """File of the record, on a file system that all sites reach. It may have another path at each
    site. While the sites hear each other, none of them needs it."""

    s3: Annotated[str, pydantic.Field(pattern="^s3://[^/]+/.+")] | None = None
    """Object of the record, in place of a file: s3://bucket/key, in S3 or in a store with its
    conditional writes. It takes the extra `s3`."""

    @pydantic.model_validator(mode="after")
    def _has_one_place(self) -> "LeaseSettings":
        if (self.path is None) == (self.s3 is None):
            raise ValueError("the record lies in one place; give path or s3")
        return self

    @property
    def place(self) -> str:
        """The path or the URL of the record."""
        return str(self.path or self.s3)


class LossSettings(Settings):
    """Behavior of islands when a site is lost."""

    on_loss: Literal["restart", "go_on"] = "restart"
    """"restart": the run ends at all sites, and a restart goes on from a checkpoint. "go_on": the
    others do the step again without the lost site, and go on. This requires dc.role "data" and
    `lease`."""

    batch: Literal["keep", "shrink"] = "keep"
    """Batch while a site is lost, with on_loss "go_on". "keep": the others compute its share too,
    so that the losses stay the same. "shrink": its share is left out, so that a step takes no
    longer, and learns from fewer sequences."""

    lease: LeaseSettings | None = None
    """The record by which the sites decide who goes on. null: none, with on_loss "restart"."""

    join_pause: Annotated[float, pydantic.Field(ge=0, le=60, allow_inf_nan=False)] = (
        JOIN_PAUSE_SECONDS
    )
    """Longest pause of the others, in seconds, for a site that returns and does not catch up with
    their steps. They pause once; after that it comes later, or not."""

    @property
    def goes_on(self) -> bool:
        """True if the other sites go on without one that is lost."""
        return self.on_loss == "go_on"

    @property
    def keeps_batch(self) -> bool:
        """True if the others compute the share of a lost site."""
        return self.goes_on and self.batch == "keep"
