"""Compiled programs as HLO text: what they send, over which axis, and beside what compute."""

from geojax.hlo.module import HloParseError
from geojax.hlo.traffic import Collective, Traffic, collective_traffic

__all__ = ["Collective", "HloParseError", "Traffic", "collective_traffic"]
