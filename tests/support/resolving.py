"""Runs built from a config alone: resolved on their own devices, and planned on a mesh."""

import jax

from geojax.islands.island_plan import island_plan
from geojax.planner.measured_timeline import draw
from geojax.planner.resolve.resolve import resolve
from geojax.step.config_plan import step_plan
from geojax.train.compiled_run import CompiledRun
from geojax.train.islands.island_run import IslandRun


def step_of(config, devices=None):
    """Resolve the step of a config, on all devices if none are given; those of a site of islands.

    All sites of islands have such devices.
    """
    devices = jax.devices() if devices is None else devices
    if config.dc.join == "islands":
        devices = config.mesh.dc * devices
    return resolve(config, config.load_topology(), devices)


def compiled_run(config, mesh, validate=False):
    step = step_of(config, list(mesh.devices.flat))
    return CompiledRun.build(config, step, step_plan(config, step, mesh), validate=validate)


def island_run(config, mesh, transport, **given):
    step = step_of(config, list(mesh.devices.flat))
    plan = island_plan(config, step.layout, mesh)
    return IslandRun.build(config, step, plan, transport, draw, **given)
