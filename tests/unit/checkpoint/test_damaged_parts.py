"""Damage at one site: the other holds the same, or both go back together."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

from geojax.checkpoint import Checkpointer
from geojax.checkpoint.reading.choice import SaveChoice, SavedPart, SaveKey, restorable
from geojax.sharding.leaf_layouts import LeafLayout

SITES = ("east", "west")
LAYOUTS = {"weights": LeafLayout((24, 6), np.dtype(np.float32))}


@pytest.fixture
def mesh():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    return Mesh(devices, ("dc", "data"), axis_types=(AxisType.Auto,) * 2)


def on(mesh: Mesh, step: int):
    sharding = NamedSharding(mesh, LAYOUTS["weights"].spec())
    return {"weights": jax.device_put(np.full((24, 6), step, np.float32), sharding)}


def save(folder: Path, mesh: Mesh, *steps: int) -> None:
    with Checkpointer(folder, mesh, sites=SITES) as checkpointer:
        for step in steps:
            checkpointer.save(step, on(mesh, step), LAYOUTS, {"model": {}})


def flip_a_bit(part: Path) -> None:
    files = (path for path in part.rglob("*") if path.is_file() and path.parent.name == "d")
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 3] ^= 4
    largest.write_bytes(content)


def names(folder: Path) -> list[str]:
    found = (path.name for path in folder.iterdir() if path.is_dir())
    return sorted(found)


def test_a_damaged_part_is_read_from_the_other_site(tmp_path, mesh):
    save(tmp_path, mesh, 10, 20)
    flip_a_bit(tmp_path / "east" / "20")
    lines = []
    with Checkpointer(tmp_path, mesh, sites=SITES, report=lines.append) as checkpointer:
        state, metadata = checkpointer.restore(LAYOUTS)
        assert metadata["step"] == 20
        np.testing.assert_array_equal(state["weights"], np.full((24, 6), 20))
        checkpointer.save(30, state, LAYOUTS, {"model": {}})
    (told,) = (line for line in lines if "is damaged" in line)
    assert told.startswith(f"{tmp_path}/east/20: is damaged (")
    assert told.endswith("; its site reads the part of another, which holds the same")
    assert names(tmp_path / "east") == names(tmp_path / "west") == ["10", "20", "30"]


def test_both_go_back_where_no_part_is_whole(tmp_path, mesh):
    save(tmp_path, mesh, 10, 20)
    for site in SITES:
        flip_a_bit(tmp_path / site / "20")
    with Checkpointer(tmp_path, mesh, sites=SITES, report=lambda line: None) as checkpointer:
        state, metadata = checkpointer.restore(LAYOUTS)
        assert metadata["step"] == 10
        checkpointer.save(20, state, LAYOUTS, {"model": {}})
    assert names(tmp_path / "east") == names(tmp_path / "west") == ["10", "20", "20.damaged"]


def part(step: int, site: int, *, has_all: bool, problem: str = "") -> SavedPart:
    return SavedPart(f"{SITES[site]}/{step}", step, "run", site, SITES, has_all, problem=problem)


def steps(choices: list[SaveChoice]) -> list[SaveKey]:
    return [choice.key.step for choice in choices]


@pytest.mark.parametrize(
    ("has_all", "sees_other", "wanted"),
    [(True, True, [20, 10]), (True, False, [10, 20]), (False, True, [10])],
)
def test_the_newest_step_is_taken_where_each_site_sees_all_of_it(has_all, sees_other, wanted):
    """Without a common file system a site that sees nothing would get all over the link."""
    own = [[part(10, site, has_all=has_all), part(20, site, has_all=has_all)] for site in range(2)]
    own[0][1] = own[0][1]._replace(problem="its checksum differs")
    seen = [own[0] + own[1], own[1] + own[0]] if sees_other else own
    found = restorable(seen, SITES, ())
    assert steps(found.choices) == wanted
    assert found.problems[20] == "its checksum differs"


def test_a_whole_part_that_cannot_be_used_is_not_called_damaged(tmp_path, mesh):
    save(tmp_path, mesh, 10, 20)
    with Checkpointer(tmp_path, mesh, sites=SITES, report=lambda line: None) as checkpointer:
        state, _ = checkpointer.restore(LAYOUTS)
        checkpointer._unusable_steps = [20]
        checkpointer._damaged_parts = [tmp_path / "east" / "20"]
        checkpointer.save(30, state, LAYOUTS, {"model": {}})
    assert names(tmp_path / "east") == ["10", "20.damaged", "30"]
    assert names(tmp_path / "west") == ["10", "20.aside", "30"]
