"""Runs that were saved: served, judged on held-out text, and exported."""
