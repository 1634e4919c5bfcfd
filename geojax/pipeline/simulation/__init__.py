"""What a schedule takes, in time and memory, before it runs."""
