"""Runs on sites that are JAX runtimes of their own: plan, stages and trainer of a site."""
