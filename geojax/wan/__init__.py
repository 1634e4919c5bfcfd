"""An emulated long link on one machine: sites as network namespaces, real packets between them.

wan = bring_up(WanSettings(round_trip_seconds=0.021, bytes_per_second=125e6))
subprocess.run([*wan.site("west").command_prefix, "hostname", "-i"])
before = traffic(wan)
...
take_down()
"""

from geojax.wan.emulate import (
    bring_up,
    cut,
    is_cut,
    problems,
    reshape,
    restore,
    running,
    take_down,
    traffic,
)
from geojax.wan.namespaces import SiteTraffic, congestion_control, require_namespaces
from geojax.wan.settings import SITE_NAMES, WanSettings
from geojax.wan.state import DEFAULT_NAME, EmulatedSite, EmulatedWan

__all__ = [
    "DEFAULT_NAME",
    "SITE_NAMES",
    "EmulatedSite",
    "EmulatedWan",
    "SiteTraffic",
    "WanSettings",
    "bring_up",
    "congestion_control",
    "cut",
    "is_cut",
    "problems",
    "require_namespaces",
    "reshape",
    "restore",
    "running",
    "take_down",
    "traffic",
]
