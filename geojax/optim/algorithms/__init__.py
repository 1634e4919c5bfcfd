"""Optimizers on shards that optax has for whole arrays only, or with less memory."""
