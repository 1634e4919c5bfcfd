"""Memory and traffic of a training step, predicted before a device is touched."""
