"""Process start-up: devices, sites, XLA flags, barriers with timeouts, watchdog."""

from geojax.runtime.devices import simulate_devices

__all__ = ["simulate_devices"]
