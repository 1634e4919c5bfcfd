"""A checkpoint of a pipeline restores onto a mesh without one, and the other way round."""

import jax
import numpy as np
import pytest
from support import whole_state
from support.staged_states import (
    LAYOUTS,
    SITES,
    assert_same_bits,
    initial,
    numbered,
)

from geojax.checkpoint import Checkpointer
from geojax.checkpoint.reading.choice import list_parts
from geojax.checkpoint.site_group import select_stage


class Compilations:
    """The names of the programs that are compiled while this is entered."""

    def __enter__(self):
        self.names = set()
        jax.monitoring.register_event_duration_secs_listener(self.listen)
        return self

    def listen(self, event, seconds, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            self.names.add(details["fun_name"])

    def __exit__(self, *error):
        jax.monitoring.unregister_event_duration_listener(self.listen)


@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_of_a_save_crosses_the_cut(tmp_path, monkeypatch, name):
    """Layers are uneven and, with sites as stages, in the shape of a V."""
    mesh, layouts, state, _ = numbered(name)
    programs = []

    def recorded(*place):
        select = select_stage.__wrapped__(*place)

        def run(leaf):
            programs.append(select.lower(leaf).compile())
            return programs[-1](leaf)

        return run

    monkeypatch.setattr("geojax.checkpoint.site_group.select_stage", recorded)
    with (
        Checkpointer(tmp_path, mesh, sites=SITES) as checkpointer,
        Compilations() as compilations,
    ):
        checkpointer.save(1, state, layouts, {})
    # Orbax cuts the shards of leaves that several devices hold, each on its device.
    assert compilations.names <= {"jit(select)", "jit(slice)"}, "no other program runs"
    assert bool(programs) == (name != "no pipeline")
    of_site = [set(devices.flat) for devices in mesh.devices]
    for program in programs:
        (leaf,) = program.input_shardings[0]
        assert leaf.device_set in of_site, "its devices are those of one site"


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_restore_onto_the_same_layout_runs_no_program_and_reads_its_own_site(tmp_path, name):
    mesh, layouts, state, _ = numbered(name)
    lines = []
    with Checkpointer(tmp_path, mesh, sites=SITES) as checkpointer:
        checkpointer.save(1, state, layouts, {})
    with (
        Checkpointer(tmp_path, mesh, sites=SITES, report=lines.append) as checkpointer,
        Compilations() as compilations,
    ):
        again, _ = checkpointer.restore(layouts)
    assert not compilations.names
    assert not lines, "nothing is announced that would cross"
    jax.tree.map(assert_same_bits, again, state)


def only_own_folder(checkpoints, own):
    """As if each site had a file system of its own."""
    return [part for part in list_parts(checkpoints, own) if part.path.startswith(own.name)]


@pytest.mark.parametrize(
    ("saved", "restored", "crosses"),
    [
        ("no pipeline", "sites as stages", False),
        ("sites as stages", "a pipeline in each site", True),
        ("sites as stages", "other stages", True),
    ],
)
def test_sites_send_each_other_what_they_lack(tmp_path, monkeypatch, saved, restored, crosses):
    monkeypatch.setattr("geojax.checkpoint.reading.choice.list_parts", only_own_folder)
    mesh, layouts, state, whole = numbered(saved)
    with Checkpointer(tmp_path, mesh, sites=SITES) as checkpointer:
        checkpointer.save(1, state, layouts, {})
    other_mesh, other_layouts, _ = initial(restored)
    lines = []
    with Checkpointer(
        tmp_path, other_mesh, sites=SITES, link_bytes_per_second=1e6, report=lines.append
    ) as checkpointer:
        again, _ = checkpointer.restore(other_layouts)
    trimmed = whole_state.trim(again, other_layouts, other_mesh)
    jax.tree.map(np.testing.assert_array_equal, trimmed, whole)
    assert len(lines) == crosses
    if crosses:
        assert "over the link of another site's checkpoint; at 1 MB/s between sites" in lines[0]


@pytest.mark.parametrize("sites", [None, SITES], ids=["together", "each site"])
@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        ("no pipeline", "sites as stages"),
        ("sites as stages", "a pipeline in each site"),
        ("a pipeline in each site", "no pipeline"),
    ],
)
def test_the_state_is_the_models_whatever_holds_it(tmp_path, saved, restored, sites):
    mesh, layouts, state, whole = numbered(saved)
    with Checkpointer(tmp_path, mesh, sites=sites) as checkpointer:
        checkpointer.save(1, state, layouts, {})
    other_mesh, other_layouts, other = initial(restored)
    with Checkpointer(tmp_path, other_mesh, sites=sites) as checkpointer:
        again, _ = checkpointer.restore(other_layouts)
    for leaf, expected in zip(jax.tree.leaves(again), jax.tree.leaves(other), strict=True):
        assert leaf.sharding.is_equivalent_to(expected.sharding, leaf.ndim)
    trimmed = whole_state.trim(again, other_layouts, other_mesh)
    jax.tree.map(np.testing.assert_array_equal, trimmed, whole)
