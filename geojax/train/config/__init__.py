"""Settings of a run, checked before any device is touched, and what a resumed run takes over."""
