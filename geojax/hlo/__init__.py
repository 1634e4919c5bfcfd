"""Compiled programs as HLO text: what they send, over which axis, and beside what."""

from geojax.hlo.traffic import Collective, Traffic, collective_traffic

__all__ = ["Collective", "Traffic", "collective_traffic"]
