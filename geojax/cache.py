"""Cache folder for built-in corpora and compiled programs, which can be made again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return geojax's folder among the user's caches: in `$XDG_CACHE_HOME`, else in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "geojax"
