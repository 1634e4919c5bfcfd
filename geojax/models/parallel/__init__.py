"""Sharding of one model over the ranks that share it: tensor, context, expert."""
