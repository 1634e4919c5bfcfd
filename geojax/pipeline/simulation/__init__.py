"""The time and memory of a schedule, before it runs."""
