"""Runs as their checkpoints tell them: exported, evaluated, and read by other commands."""
