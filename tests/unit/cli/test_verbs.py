"""A verb costs its own imports alone."""

import subprocess
import sys

import pytest
from support.processes import PATIENCE_SECONDS

HEAVY = ("jax", "orbax", "matplotlib", "grain", "flax", "tyro")


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import geojax.cli.main", HEAVY),
        ("from geojax.cli.main import run; run(['--help'])", HEAVY[:-1]),
        ("import geojax.cli.train, geojax.cli.config_commands", HEAVY[:-1]),
        ("import geojax.cli.launch, geojax.cli.plan", HEAVY[:-1]),
        ("import geojax.cli.wan, geojax.cli.probe, geojax.cli.data", HEAVY[:-1]),
    ],
)
def test_what_is_imported_before_it_is_needed(statement, unwanted):
    script = f"{statement}\nimport sys\nprint(*({set(unwanted)!r} & set(sys.modules)), end='!')"
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{script}"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    assert ended.stdout.endswith("!")
    assert ended.stdout.splitlines()[-1].strip() == "!"
