"""The metadata of a run's newest checkpoint, read before there is a program to restore it into."""

from pathlib import Path
from typing import Any

from geojax.checkpoint import manifest
from geojax.checkpoint.folder import committed_steps


def newest_metadata(folder: Path) -> dict[str, Any] | None:
    """Return the metadata of the newest checkpoint in `folder` whose manifest is whole.

    Its arrays may turn out to be damaged at the restore, which then takes an older checkpoint.

    Returns:
        The metadata with "step"; None where there is no such checkpoint.
    """
    for step in committed_steps(folder):
        try:
            content = manifest.read(folder / str(step))
        except manifest.DamagedCheckpoint:
            continue
        return {**content["metadata"], "step": content["step"]}
    return None
