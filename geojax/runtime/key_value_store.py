"""Small notes that the processes of one job exchange.

They lie in the key-value store of JAX's coordination service, in process 0, and need no device. In
a job of one process nothing is kept.
"""

from geojax.runtime.jax_private import coordination_client


def publish(key: str, value: str) -> None:
    """Let every process of the job read `value` under `key`; a later value replaces it."""
    client = coordination_client()
    if client is not None:
        client.key_value_set(f"geojax/{key}", value, allow_overwrite=True)


def published(folder: str) -> dict[str, str]:
    """Return the values that are published under `folder`/, by the rest of their keys."""
    client = coordination_client()
    if client is None:
        return {}
    prefix = f"geojax/{folder}/"
    return {key.removeprefix(prefix): value for key, value in client.key_value_dir_get(prefix)}
