"""What a run will need, said before a device is touched."""
