"""The choices of a layout that a user opens or restricts."""

import dataclasses

from geojax.layout_names import DcRole, Join, PrecisionName, WireName


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenChoices:
    """The roles, joins, precisions and compressions among which a search chooses."""

    roles: tuple[DcRole, ...] = ("data", "stage")
    """Roles of the sites to choose from."""
    joins: tuple[Join, ...] = ("one_program",)
    """Ways to join the sites to choose from. Default: one_program, or islands for unlike sites."""
    precisions: tuple[PrecisionName, ...] = ("bf16",)
    """Precisions to choose from, all good enough; default: the config's, or bf16."""
    compressions: tuple[WireName, ...] = ("none",)
    """Gradient compressions to choose from, all good enough; default: the config's, or none."""
