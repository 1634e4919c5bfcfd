"""Trackers of a run: libraries, and classes of yours, that are told its metrics."""

from geojax.trackers.tracker import TrackedRun as TrackedRun
from geojax.trackers.tracker import Tracker as Tracker
