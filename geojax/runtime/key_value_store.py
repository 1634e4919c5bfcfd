"""Small notes that the processes of one job exchange, each signed by a process of the job.

They lie in the key-value store of JAX's coordination service, in process 0, and need no device. In
a job of one process nothing is kept. Anybody who reaches the coordinator's port may write into that
store. Notes without a signature by the job's key, which the rendezvous has handed out, are
therefore ignored.
"""

import hashlib
import hmac

import jax.errors

from geojax.runtime.jax_private import coordination_client

_SIGNATURE_BYTES = 16
_key = b""


def sign_with(key: bytes) -> None:
    """Sign what this process publishes from now on, and believe only what is signed by `key`."""
    global _key
    _key = key


def publish(key: str, value: str) -> None:
    """Let every process of the job read `value` under `key`; a later value replaces it."""
    client = coordination_client()
    if client is not None:
        client.key_value_set(f"geojax/{key}", _signed(key, value), allow_overwrite=True)


def publish_first(key: str, value: str) -> None:
    """Publish `value`, unless a process of the job has published another under `key` before."""
    client = coordination_client()
    if client is None:
        return
    try:
        client.key_value_set(f"geojax/{key}", _signed(key, value), allow_overwrite=False)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        if read(key) is None:  # not of this job
            publish(key, value)


def discard(key: str) -> None:
    """Drop what is published under `key`."""
    client = coordination_client()
    if client is not None:
        client.key_value_delete(f"geojax/{key}")


def read(key: str) -> str | None:
    """Return the value that is published under `key`; None if there is none."""
    client = coordination_client()
    if client is None:
        return None
    try:
        return _verified(key, client.key_value_try_get_bytes(f"geojax/{key}"))
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def await_published(key: str, timeout_seconds: float) -> str | None:
    """Wait until something is published under `key`; None if that takes too long or is forged."""
    client = coordination_client()
    if client is None:
        return None
    try:
        note = client.blocking_key_value_get_bytes(f"geojax/{key}", int(timeout_seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None
    return _verified(key, note)


def published(folder: str) -> dict[str, str]:
    """Return the values that are published under `folder`/, by the rest of their keys.

    Only one process may read a folder in which every process has an entry: thousands that read
    thousands of entries are more than process 0 can answer.
    """
    client = coordination_client()
    if client is None:
        return {}
    found = {}
    for key, note in client.key_value_dir_get_bytes(f"geojax/{folder}/"):
        value = _verified(key.removeprefix("geojax/"), note)
        if value is not None:
            found[key.removeprefix(f"geojax/{folder}/")] = value
    return found


def _signed(key: str, value: str) -> str:
    return _signature(key, value.encode()).hex() + value


def _verified(key: str, note: bytes) -> str | None:
    """Return the value in a note that a process of this job has published under `key`, else None.

    A valid note that is copied to another key is not valid there.
    """
    signature, value = note[: 2 * _SIGNATURE_BYTES], note[2 * _SIGNATURE_BYTES :]
    if not hmac.compare_digest(signature, _signature(key, value).hex().encode()):
        return None
    return value.decode()


def _signature(key: str, value: bytes) -> bytes:
    text = key.encode() + b"\0" + value
    return hmac.digest(_key, text, hashlib.sha256)[:_SIGNATURE_BYTES]
