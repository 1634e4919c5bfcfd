"""Attention of sequences that the ranks of `context` share."""
