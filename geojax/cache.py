"""Where geojax keeps what it can make again: built-in corpora, compiled programs."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder of geojax among the user's caches: in `$XDG_CACHE_HOME`, else in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "geojax"
