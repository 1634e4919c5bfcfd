import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from orbax.checkpoint._src.futures import future

from geojax.checkpoint import Checkpointer
from geojax.checkpoint.reading.saved_model import SavedModel
from geojax.errors import RunError, UserError
from geojax.sharding.leaf_layouts import DimSharding, LeafLayout

MODEL = {"layers": 12, "rope": {"theta": 10000.0}, "tied": True}
METADATA_STORE = "orbax.checkpoint._src.metadata.checkpoint._MetadataStoreImpl"
METADATA = {"model": MODEL, "data": {"step": 3, "epoch": 0}, "seed": 7}


class Moments(NamedTuple):
    count: Any
    mean: Any
    nothing: Any


def mesh(dc: int, data: int) -> Mesh:
    devices = np.array(jax.devices()[: dc * data]).reshape(dc, data)
    return Mesh(devices, ("dc", "data"), axis_types=(AxisType.Auto,) * 2)


def values(scale: float = 1.0) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    weights = generator.standard_normal((24, 6), np.float32) * scale
    return {
        # More than ten layers: names sort differently from numbers.
        "parameters": [np.full((3, 12), layer * scale, np.float32) for layer in range(12)],
        "optimizer": Moments(np.int32(5), weights.astype(jnp.bfloat16), None),
        "weights": weights,
    }


def layouts_on(place: Mesh) -> dict[str, Any]:
    """Layouts that shard the first dim of 24 rows, else the second of 12, over `data`."""
    ranks = place.shape["data"]

    def layout(leaf: Any) -> LeafLayout:
        if leaf.ndim == 0:
            return LeafLayout(leaf.shape, leaf.dtype)
        dim = 0 if leaf.shape[0] == 24 else 1
        shard = DimSharding(dim, ("data",), ranks)
        return LeafLayout(leaf.shape, leaf.dtype, shard=shard)

    return jax.tree.map(layout, values())


def on(place: Mesh, scale: float = 1.0) -> dict[str, Any]:
    return jax.tree.map(
        lambda leaf, layout: jax.device_put(leaf, NamedSharding(place, layout.spec())),
        values(scale),
        layouts_on(place),
    )


def assert_is(state: dict[str, Any], scale: float = 1.0) -> None:
    assert jax.tree.structure(state) == jax.tree.structure(values())
    jax.tree.map(np.testing.assert_array_equal, state, values(scale))


def save(folder: Path, *steps: int, keep: int = 3) -> None:
    with Checkpointer(folder, mesh(2, 4), keep=keep) as checkpointer:
        for step in steps:
            checkpointer.save(step, on(mesh(2, 4), step), layouts_on(mesh(2, 4)), METADATA)


def restore(folder: Path, **settings: Any) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    lines: list[str] = []
    with Checkpointer(folder, mesh(2, 4), report=lines.append) as checkpointer:
        state, metadata = checkpointer.restore(layouts_on(mesh(2, 4)), model=MODEL, **settings)
    return state, metadata, lines


@pytest.mark.parametrize(("dc", "data"), [(2, 4), (1, 3), (3, 2), (1, 1)])
def test_restores_onto_another_mesh(tmp_path: Path, dc: int, data: int) -> None:
    save(tmp_path, 3)
    place = mesh(dc, data)
    with Checkpointer(tmp_path, place) as checkpointer:
        state, metadata = checkpointer.restore(layouts_on(place), model=MODEL)
    assert_is(state, 3)
    for leaf, layout in zip(
        jax.tree.leaves(state), jax.tree.leaves(layouts_on(place)), strict=True
    ):
        assert leaf.sharding == NamedSharding(place, layout.spec())
    assert metadata == {**METADATA, "step": 3}


def test_float64_is_restored_exactly(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        state = {"weights": jnp.linspace(0.0, 1.0, 7, dtype=jnp.float64)}
        layouts = {"weights": LeafLayout((7,), np.dtype(np.float64))}
        with Checkpointer(tmp_path, mesh(1, 1)) as checkpointer:
            checkpointer.save(1, state, layouts, METADATA)
            restored, _ = checkpointer.restore(layouts)
        assert restored["weights"].dtype == jnp.float64
        np.testing.assert_array_equal(restored["weights"], state["weights"])


def test_arrays_may_be_donated_while_the_save_goes_on(tmp_path: Path) -> None:
    advance = jax.jit(lambda state: jax.tree.map(lambda x: x * 0 - 1, state), donate_argnums=0)
    with Checkpointer(tmp_path, mesh(2, 4)) as checkpointer:
        state = on(mesh(2, 4))
        checkpointer.save(1, state, layouts_on(mesh(2, 4)), METADATA)
        for _ in range(3):
            state = advance(state)
        jax.block_until_ready(state)
        checkpointer.wait()
    assert_is(restore(tmp_path)[0])


def test_a_save_sends_no_signal_under_a_name_that_other_sites_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orbax's have one name in the whole job: the site that has saved removes the other's."""

    def send(signals: object) -> None:
        pytest.fail(f"a signal was sent: {signals}")

    monkeypatch.setattr(future.AwaitableSignalsContract, "add_to_awaitable_signals_contract", send)
    save(tmp_path, 1)
    assert (tmp_path / "1").is_dir()


def test_keeps_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 9, 10, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "9"]
    with Checkpointer(tmp_path, mesh(2, 4)) as checkpointer:
        assert checkpointer.newest() == {**METADATA, "step": 10}


def test_the_same_step_is_saved_once(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, mesh(2, 4)) as checkpointer:
        checkpointer.save(1, on(mesh(2, 4)), layouts_on(mesh(2, 4)), METADATA)
        checkpointer.save(1, on(mesh(2, 4), 5), layouts_on(mesh(2, 4)), METADATA)
    with Checkpointer(tmp_path, mesh(2, 4)) as checkpointer:
        checkpointer.restore(layouts_on(mesh(2, 4)))
        checkpointer.save(1, on(mesh(2, 4), 5), layouts_on(mesh(2, 4)), METADATA)
    assert_is(restore(tmp_path)[0])


def test_a_step_before_the_newest_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 5)
    with pytest.raises(UserError, match="already holds a checkpoint of step 5"):
        save(tmp_path, 4)


def test_when_to_save(tmp_path: Path) -> None:
    by_steps = Checkpointer(tmp_path, mesh(2, 4), interval=4)
    assert [step for step in range(9) if by_steps.should_save(step)] == [4, 8]
    assert not by_steps.due(float("inf"))
    by_time = Checkpointer(tmp_path, mesh(2, 4), interval_minutes=2)
    assert not any(by_time.should_save(step) for step in range(9))
    now = time.monotonic()
    assert not by_time.due()
    assert not by_time.due(now + 118)
    assert by_time.due(now + 121)


def test_a_folder_by_another_path_is_written_and_read(tmp_path: Path) -> None:
    (tmp_path / "disk" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "deep")
    save(tmp_path / "link" / ".." / "run" / "checkpoints", 10)
    for path in ("disk/deep/../run", "disk/run/.", "link/../run"):
        assert_is(restore(tmp_path / path / "checkpoints")[0], 10)
    assert SavedModel.open(tmp_path / "link" / ".." / "run").step == 10


def remove(name: str) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        path = checkpoint / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def largest_file(checkpoint: Path) -> Path:
    files = (path for path in checkpoint.rglob("*") if path.is_file() and path.parent.name == "d")
    return max(files, key=lambda path: path.stat().st_size)


def truncate(checkpoint: Path) -> None:
    path = largest_file(checkpoint)
    path.write_bytes(path.read_bytes()[:-5])


def flip_a_bit(checkpoint: Path) -> None:
    path = largest_file(checkpoint)
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def change_the_metadata(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    path.write_text(path.read_text().replace('"seed": 7', '"seed": 8'))


def empty(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


def put_a_pipe(path: Path) -> None:
    """Put what is read for ever in the place of a file."""
    path.unlink()
    os.mkfifo(path)


def pipe_of_numbers(checkpoint: Path) -> None:
    put_a_pipe(largest_file(checkpoint))


def pipe_of_the_manifest(checkpoint: Path) -> None:
    put_a_pipe(checkpoint / "manifest.json")


def manifest_too_deep(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text("[" * 100_000)


def manifest_too_long(checkpoint: Path) -> None:
    with (checkpoint / "manifest.json").open("ab") as file:
        file.truncate(2**28 + 1)


DAMAGES = [
    *map(remove, ["manifest.json", "manifest.ocdbt", "_METADATA", "d", "ocdbt.process_0"]),
    truncate,
    flip_a_bit,
    change_the_metadata,
    empty,
    pipe_of_numbers,
    pipe_of_the_manifest,
    manifest_too_deep,
    manifest_too_long,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    save(tmp_path, 10, 20)
    damage(tmp_path / "20")
    state, metadata, lines = restore(tmp_path)
    assert_is(state, 10)
    assert metadata["step"] == 10
    (line,) = lines
    assert "step 20 is not whole (" in line
    assert line.endswith("restoring step 10 instead")
    assert "\n" not in line
    assert (tmp_path / "20").is_dir()


def test_a_save_with_a_pipe_is_not_put_to_work(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 10, 20)
    pipe_of_numbers(tmp_path / "checkpoints" / "20")
    lines: list[str] = []
    assert SavedModel.open(tmp_path, log=lines.append).step == 10
    assert "step 20 is damaged: 20: " in lines[0]
    assert "is no regular file; reading step 10" in lines[0]


def test_a_run_in_a_circle_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(UserError, match="leads through a circle of links"):
        SavedModel.open(tmp_path / "circle")


def test_a_changed_timestamp_of_orbax_is_no_damage(tmp_path: Path) -> None:
    save(tmp_path, 10)
    remove("_CHECKPOINT_METADATA")(tmp_path / "10")
    assert_is(restore(tmp_path)[0], 10)


def test_what_is_not_whole_makes_room_when_training_goes_on(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    flip_a_bit(tmp_path / "20")
    shutil.copytree(tmp_path / "20", tmp_path / "30.orbax-checkpoint-tmp")
    lines: list[str] = []
    with Checkpointer(tmp_path, mesh(2, 4), keep=2, report=lines.append) as checkpointer:
        state, _ = checkpointer.restore(layouts_on(mesh(2, 4)))
        assert "step 30 is not whole (its save was interrupted), step 20 is" in lines.pop()
        checkpointer.save(20, state, layouts_on(mesh(2, 4)), METADATA)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "20", "20.damaged"]
    assert [line.rpartition(": ")[2] for line in lines[:2]] == [
        "damaged; renamed to 20.damaged",
        "removed the interrupted save of step 30",
    ]
    assert re.fullmatch(r"step 20: training waited \d+\.\d\d s for the checkpoint's copy", lines[2])
    assert restore(tmp_path)[1]["step"] == 20


def test_none_whole(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no checkpoint"):
        restore(tmp_path)
    save(tmp_path, 10, 20)
    flip_a_bit(tmp_path / "20")
    truncate(tmp_path / "10")
    with pytest.raises(
        UserError, match=r"no undamaged checkpoint: step 20 .*, step 10 .*"
    ) as refusal:
        restore(tmp_path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({**MODEL, "layers": 24}, "model.layers is 12 there and 24 here"),
        ({**MODEL, "rope": {"theta": 5e5}}, "model.rope.theta is 10000.0 there and 500000.0 here"),
        ({**MODEL, "experts": 8}, "model.experts is absent there and 8 here"),
        ({"layers": 12, "rope": {"theta": 1e4}}, "model.tied is true there and absent here"),
        ({**MODEL, "rope": None}, 'model.rope is {"theta": 10000.0} there and null here'),
    ],
)
def test_another_model_is_refused_before_anything_is_read(
    tmp_path: Path, model: dict[str, Any], message: str
) -> None:
    save(tmp_path, 10)
    flip_a_bit(tmp_path / "10")
    with Checkpointer(tmp_path, mesh(2, 4)) as checkpointer, pytest.raises(UserError) as refusal:
        checkpointer.restore(layouts_on(mesh(2, 4)), model=model)
    assert str(refusal.value).endswith(message)


def test_other_arrays_are_refused(tmp_path: Path) -> None:
    save(tmp_path, 10)
    layouts = dict(layouts_on(mesh(2, 4)))
    layouts["weights"] = LeafLayout((24, 8), np.dtype(np.float32))
    with Checkpointer(tmp_path, mesh(2, 4)) as checkpointer:
        with pytest.raises(UserError, match=r"weights is float32\[24,6\] in the checkpoint and"):
            checkpointer.restore(layouts)
        del layouts["weights"]
        with pytest.raises(UserError, match=r"weights is float32\[24,6\] .* and absent in this"):
            checkpointer.restore(layouts)


def full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_failed_save_is_a_warning_and_the_next_one_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geojax.checkpoint.manifest.write", full)
    lines: list[str] = []
    checkpointer = Checkpointer(tmp_path, mesh(2, 4), report=lines.append)
    checkpointer.save(1, on(mesh(2, 4)), layouts_on(mesh(2, 4)), METADATA)
    assert not checkpointer.wait()
    assert checkpointer.failed_saves == 1
    assert "step 1 could not be saved: No space left on device" in lines[-1]
    assert "\n" not in lines[-1]
    checkpointer.save(2, on(mesh(2, 4), 2), layouts_on(mesh(2, 4)), METADATA)
    while not checkpointer.due(float("inf")):
        time.sleep(0.01)  # the save in the background has not failed yet
    monkeypatch.undo()
    checkpointer.save(3, on(mesh(2, 4), 3), layouts_on(mesh(2, 4)), METADATA)
    assert checkpointer.wait()
    assert not checkpointer.due(float("inf"))
    checkpointer.close()
    assert checkpointer.failed_saves == 2
    assert_is(restore(tmp_path)[0], 3)


def test_the_errors_of_a_full_disk_fail_no_later_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for write in ("write", "update"):
        monkeypatch.setattr(f"{METADATA_STORE}.{write}", full)
    monkeypatch.setattr("geojax.checkpoint.manifest.write", full)
    with Checkpointer(tmp_path, mesh(2, 4)) as checkpointer:
        checkpointer.save(1, on(mesh(2, 4)), layouts_on(mesh(2, 4)), METADATA)
        assert not checkpointer.wait()
        monkeypatch.undo()
        checkpointer.save(2, on(mesh(2, 4), 2), layouts_on(mesh(2, 4)), METADATA)
        assert checkpointer.wait()


def test_saves_that_always_fail_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geojax.checkpoint.manifest.write", full)
    checkpointer = Checkpointer(tmp_path, mesh(2, 4))
    for step in range(1, 5):
        checkpointer.save(step, on(mesh(2, 4)), layouts_on(mesh(2, 4)), METADATA)
        assert not checkpointer.wait()
    checkpointer.save(5, on(mesh(2, 4)), layouts_on(mesh(2, 4)), METADATA)
    with pytest.raises(RunError, match="save number 5 in a row") as failure:
        checkpointer.wait()
    assert "\n" not in str(failure.value)
    checkpointer.close()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot hold checkpoints"):
        Checkpointer(tmp_path / "file", mesh(2, 4))


def test_a_checkpoint_restores_from_a_folder_that_is_read_only(tmp_path: Path) -> None:
    save(tmp_path, 10)
    before = sorted(tmp_path.rglob("*"))
    tmp_path.chmod(0o555)
    try:
        assert_is(restore(tmp_path)[0], 10)
    finally:
        tmp_path.chmod(0o755)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_manifest_is_readable_without_geojax(tmp_path: Path) -> None:
    save(tmp_path, 1)
    manifest = json.loads((tmp_path / "1" / "manifest.json").read_text())
    assert manifest["step"] == 1
    assert manifest["metadata"] == METADATA
    assert manifest["arrays"]["optimizer.mean"] == "bfloat16[24,6]"


def test_the_arrays_are_readable_with_orbax_alone(tmp_path: Path) -> None:
    save(tmp_path, 1)
    arrays = ocp.StandardCheckpointer().restore(tmp_path / "1")
    np.testing.assert_array_equal(arrays["weights"], values()["weights"])
    assert len(arrays) == len(jax.tree.leaves(values()))
