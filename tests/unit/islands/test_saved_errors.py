"""Rounding errors of islands in checkpoints: each site's own, which one program reads together."""

import shutil

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from support.plans import step_plan_on
from support.small_models import model_of

from geojax import make_mesh
from geojax.checkpoint import Checkpointer
from geojax.collectives import INT8
from geojax.islands.programs.site_part import SitePart, even_chunks
from geojax.islands.site_state import saved_whole_layouts, site_layouts
from geojax.optim import OptimizerSettings, make_optimizer
from geojax.precision import policy
from geojax.step.state import state_layouts, with_own_sites, with_saved_sites

SITES, NAMES = 2, ("east", "west")
MODEL = model_of("gpt3")
OPTIMIZER = make_optimizer(OptimizerSettings(), 10)
PART = SitePart(MODEL, even_chunks(MODEL, 2))


def plan_of(devices, islands=1, **axes):
    return step_plan_on(
        make_mesh(devices=devices, **axes), policy("fp32"), wire_format=INT8, islands=islands
    )


def state_of(layouts, mesh, seed):
    """A state of random bits, alike at all sites but for the errors."""

    def drawn(path, layout):
        own = seed if path[0].name == "error_feedback" else 0
        generator = np.random.default_rng([own, len(jax.tree_util.keystr(path))])
        values = generator.normal(size=layout.padded_shape).astype(layout.dtype)
        return jax.device_put(values, NamedSharding(mesh, layout.spec()))

    return jax.tree_util.tree_map_with_path(drawn, layouts)


class Site:
    def __init__(self, site):
        devices = jax.devices()[2 * site :][:2]
        self.name, self.plan = NAMES[site], plan_of(devices, SITES, data=2)
        self.layouts = site_layouts(PART, OPTIMIZER, self.plan)
        self.parts = [saved_whole_layouts(self.layouts, self.plan, each) for each in range(SITES)]
        self.saved = self.parts[site]
        self.state = state_of(self.layouts, self.plan.mesh, 1 + site)

    def checkpoints(self, folder):
        return Checkpointer(folder, self.plan.mesh, sites=NAMES, island=self.name)

    def save(self, folder):
        with self.checkpoints(folder) as checkpoints:
            checkpoints.run = "the same at all sites"
            checkpoints.save(5, self.state, self.saved, {}, self.parts)

    def restore(self, folder):
        with self.checkpoints(folder) as checkpoints:
            found, _ = checkpoints.restore(self.saved, adapt=with_saved_sites, parts=self.parts)
        return with_own_sites(found, self.layouts, self.plan)


class OneProgram:
    def __init__(self):
        self.plan = plan_of(jax.devices()[:4], dc=SITES, data=2)
        self.layouts = state_layouts(MODEL, OPTIMIZER, self.plan)

    def checkpoints(self, folder, report=print):
        return Checkpointer(folder, self.plan.mesh, sites=NAMES, report=report)

    def restore(self, folder, report=print):
        with self.checkpoints(folder, report) as checkpoints:
            found, _ = checkpoints.restore(self.layouts, adapt=with_saved_sites)
        return with_own_sites(found, self.layouts, self.plan)


@pytest.fixture(scope="module")
def sites():
    return [Site(site) for site in range(SITES)]


@pytest.fixture(scope="module")
def folder(sites, tmp_path_factory):
    made = tmp_path_factory.mktemp("islands")
    for site in sites:
        site.save(made)
    return made


def errors_of(state, site):
    return [
        np.take(np.asarray(leaf), site, axis=1 if "layers" in jax.tree_util.keystr(path) else 0)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.error_feedback)
    ]


def test_one_program_and_islands_go_on_with_the_errors_of_each_site(sites, folder, tmp_path):
    program = OneProgram()
    resumed = program.restore(folder)
    with program.checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, resumed, program.layouts, {})
    for number, site in enumerate(sites):
        own = errors_of(site.state, 0)
        assert all(map(np.any, own))
        jax.tree.map(np.testing.assert_array_equal, errors_of(resumed, number), own)
        for source in (folder, tmp_path):
            jax.tree.map(np.testing.assert_array_equal, site.restore(source), site.state)


def test_one_program_begins_the_errors_of_a_site_anew_whose_part_is_gone(sites, folder, tmp_path):
    shutil.copytree(folder / "east", tmp_path / "east")
    told = []
    resumed = OneProgram().restore(tmp_path, told.append)
    assert (
        f"{tmp_path}/5: the part of site west is not here; its error_feedback begins anew" in told
    )
    jax.tree.map(np.testing.assert_array_equal, errors_of(resumed, 0), errors_of(sites[0].state, 0))
    assert not any(map(np.any, errors_of(resumed, 1)))
