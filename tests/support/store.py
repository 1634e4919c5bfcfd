"""JAX's key-value store and barrier for simulated processes, with a count of what they ask."""

import collections

import jax

KEY = bytes(range(32))


class Store:
    """A client of the coordination service, as `geojax.runtime` uses it."""

    def __init__(self):
        self.notes: dict[str, bytes] = {}
        self.calls = collections.Counter()
        self.entries_read = 0

    def key_value_set(self, key, value, allow_overwrite=False):
        self.calls["set"] += 1
        if key in self.notes and not allow_overwrite:
            raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
        self.notes[key] = value.encode() if isinstance(value, str) else value

    def key_value_try_get_bytes(self, key):
        self.calls["get"] += 1
        if key not in self.notes:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: Config key {key} not found.")
        self.entries_read += 1
        return self.notes[key]

    def blocking_key_value_get_bytes(self, key, timeout_in_ms):
        self.calls["get"] += 1
        if key not in self.notes:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
        self.entries_read += 1
        return self.notes[key]

    def key_value_delete(self, key):
        self.notes.pop(key, None)

    def key_value_dir_get_bytes(self, key):
        self.calls["folder"] += 1
        found = [(name, note) for name, note in self.notes.items() if name.startswith(key)]
        self.entries_read += len(found)
        return found

    def wait_at_barrier(self, barrier_id, timeout_in_ms):
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out.")
