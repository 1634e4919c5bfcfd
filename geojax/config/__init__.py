"""Settings of a run, checked before any device is touched."""
