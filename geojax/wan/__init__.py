"""An emulated long link on one machine: sites as network namespaces, real packets between them."""

from geojax.wan.settings import SITE_NAMES, WanSettings
from geojax.wan.state import EmulatedSite, EmulatedWan

__all__ = ["SITE_NAMES", "EmulatedSite", "EmulatedWan", "WanSettings"]
