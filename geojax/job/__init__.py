"""A process's place in its job and among sites, from arguments and the environment.

No module here imports JAX, so that a command knows its place before it does.
"""
