"""Every test sees eight simulated CPU devices, on any machine."""

from geojax.runtime import simulate_devices

simulate_devices(8)
