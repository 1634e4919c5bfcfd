"""Reasons of failed writes, as a person reads them."""

import pytest

from geojax.checkpoint.failed_write import reason

FOLDER = "/data/" + "run of many sites/" * 30 + "checkpoints/west/3650.orbax-checkpoint-tmp"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (ValueError("INTERNAL: no quota\ndetails"), "INTERNAL: no quota"),
        (
            ValueError(
                f'RESOURCE_EXHAUSTED: Error writing "params" in the database at "{FOLDER}": '
                f'Error writing local file "{FOLDER}/d/0a1b.__lock": No space left on device '
                f"[source locations='tensorstore/kvstore/file.cc:1'] [tensorstore_spec='{{}}']"
            ),
            "No space left on device",
        ),
        (ValueError(), "ValueError"),
    ],
)
def test_a_reason_is_one_line_without_files(error, told):
    assert reason(error) == told
