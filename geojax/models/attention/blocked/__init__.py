"""Blocked attention in plain JAX, for any backend."""
