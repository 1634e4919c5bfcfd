"""The step of a run: resolved once for all sites, told to all processes, and kept in each site.

In one program process 0 resolves, and the key-value store tells the others. Among islands:

    process 0 of each site → all of these    devices and settings, through the rendezvous
    that of the first site → those of others the step, as the note of a second rendezvous
    process 0 of each site → its site        the step, through the site's key-value store

While the first site resolves, it meets the others every few seconds without a note: a site that is
lost meanwhile is named as at any start. Each rendezvous has the key of the one before, so that
nobody takes the answer of one for that of another.
"""

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Annotated

import jax
import pydantic

from geojax.config.run_config import RunConfig
from geojax.errors import MissingProcessesError, UserError
from geojax.job.cluster_env import ProcessSettings, complete
from geojax.job.island_env import IslandSettings
from geojax.runtime.rendezvous import Everyone
from geojax.settings import Settings
from geojax.step.resolved import DescribedDevice, RuntimeDevices, Step
from geojax.step.step_file import Devices, origin_of, read_step, runtime_devices
from geojax.topology import Topology
from geojax.train.agreed_step import (
    KeptStep,
    agreed_step,
    kept_or_resolved,
    named_differences,
    show_memory,
    step_of_note,
    step_or_error,
)
from geojax.train.islands.membership import missing_for_a_reason
from geojax.train.joined_sites import settings_of_all_sites
from geojax.train.services import Log, Services
from geojax.transport import meet
from geojax.transport.shared_settings import digests, require_same

_MEET_SECONDS = 10.0
"""Time after which the first site meets the others, whether it has resolved the step or not."""


class _SiteFacts(Settings):
    """Facts that process 0 of a site tells those of the other sites before there is a step."""

    devices: RuntimeDevices
    settings: Annotated[str, pydantic.Field(max_length=1024)]
    """Digests of what must be the same at all sites (`geojax.transport.shared_settings`)."""


def step_of_run(
    config: RunConfig,
    topology: Topology | None,
    path: Path,
    services: Services,
    log: Log,
    island: IslandSettings | None,
    processes: ProcessSettings,
    told: Step | None = None,
) -> tuple[Step, KeptStep | None]:
    """Agree on the step of a run, and check that it fits into the memory of the devices.

    Args:
        config: the run.
        topology: its sites.
        path: step.yaml of its directory, or of that of its site.
        services: resolves the step.
        log: shows a line to the user.
        island: this process's site among islands; None in one program.
        processes: settings of this process; other sites have the time that these give to start.
        told: step of the run that goes on without this site; None: all sites start.

    Returns:
        The step, and on process 0 what becomes of the file, for `keep`.

    Raises:
        UserError: the layout cannot be, does not fit and `config.preflight` says to refuse it, or
            the sites do not fit together.
        MissingProcessesError: process 0, or a site, does not come.
    """
    kept = None
    seconds = config.watchdog.first_step_seconds

    def of_devices(devices: Devices) -> KeptStep:
        origin = origin_of(config, topology, devices)
        resolve = services.resolve
        return kept_or_resolved(path, origin, lambda: resolve(config, topology, devices, log))

    def resolve() -> Step:
        nonlocal kept
        if told is not None:
            kept = _as_told(read_step(path), told, "the run that goes on")
        elif island is None:
            kept = of_devices(jax.devices())
        else:
            kept = step_of_sites(config, path, island, start_seconds, of_devices)
        return kept.step

    start_seconds = complete(processes, os.environ).start_timeout_seconds
    if island is not None:
        seconds += start_seconds
    step = agreed_step(resolve, seconds)
    show_memory(config, step.memory, log)
    return step, kept


def step_of_sites(
    config: RunConfig,
    path: Path,
    island: IslandSettings,
    start_seconds: float,
    resolve: Callable[[Devices], KeptStep],
) -> KeptStep:
    """Return the step that the first site resolves for all, on process 0 of each site.

    Args:
        config: the run of all sites.
        path: step.yaml of this site.
        island: this site among all.
        start_seconds: time that each site has to come to a rendezvous.
        resolve: makes the choices for the devices of all sites, in the first site alone.

    Raises:
        UserError: the sites do not fit together, or the step cannot be; all of them raise it.
        MissingProcessesError: a site does not come.
    """
    here = runtime_devices(jax.devices())
    settings = settings_of_all_sites(config) | {
        "number of devices": here.count,
    }
    facts = _SiteFacts(devices=here, settings=digests(settings))
    own = read_step(path)
    try:
        everyone = meet(island, start_seconds, facts.model_dump_json())
    except MissingProcessesError as error:
        raise missing_for_a_reason(error, config, island) from None
    devices = _devices_of_all(everyone, island, settings)
    if island.site == island.sites[0]:
        return _told_to_sites(island, everyone.key, start_seconds, lambda: resolve(devices))
    step = _told_by_first(island, everyone.key, start_seconds, config.watchdog.first_step_seconds)
    return _as_told(own, step, f"site {island.sites[0]}")


def _as_told(own: Step | None, step: Step, teller: str) -> KeptStep:
    """Return a step that others have told, and what becomes of the one in this site's file."""
    if own is None or own == step:
        return KeptStep(step, is_new=own is None)
    differing = own.origin.differences(step.origin) or [f"choices of {teller}"]
    return KeptStep(step, replaces=named_differences(differing))


def _devices_of_all(
    everyone: Everyone, island: IslandSettings, settings: Mapping[str, object]
) -> Devices:
    """Compare what the sites have told with this one; return the devices of all, site by site."""
    devices: list[DescribedDevice] = []
    for name, presence in zip(island.sites, everyone.processes, strict=True):
        site = f"site {name} (host {presence.host})"
        try:
            facts = _SiteFacts.model_validate_json(presence.endpoint or "")
        except pydantic.ValidationError:
            raise UserError(
                f"{site} tells other facts than site {island.site}: all sites need the same "
                "version of geojax"
            ) from None
        require_same(settings, f"site {island.site}", facts.settings, site)
        devices += facts.devices.described
    return devices


def _told_to_sites(
    island: IslandSettings, key: bytes, seconds: float, resolve: Callable[[], KeptStep]
) -> KeptStep:
    """Resolve the step in the first site, and tell it, or why it cannot be, to the others."""
    note: Future[str] = Future()
    with ThreadPoolExecutor(1, "geojax step") as thread:
        told = thread.submit(_tell, note, island, key, seconds)
        try:
            kept = resolve()
        except UserError as error:
            note.set_result(step_or_error(error))
            raise
        except BaseException as error:
            note.set_exception(error)
            raise
        note.set_result(step_or_error(kept.step))
        told.result()
    return kept


def _tell(note: Future[str], island: IslandSettings, key: bytes, seconds: float) -> None:
    """Meet the other sites again and again, the last time with the note."""
    text = None
    while text is None:
        wait([note], _MEET_SECONDS)
        text = note.result() if note.done() else None
        key = meet(island, seconds, key=key, note=text).key


def _told_by_first(
    island: IslandSettings, key: bytes, start_seconds: float, seconds: float
) -> Step:
    """Return the step that the first site tells.

    Raises:
        UserError: the step cannot be.
        MissingProcessesError: a site does not come, or the first one says nothing for `seconds`.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        everyone = meet(island, start_seconds + _MEET_SECONDS, key=key)
        key = everyone.key
        if everyone.note is not None:
            return step_of_note(everyone.note, f"site {island.sites[0]}")
    raise MissingProcessesError(
        f"site {island.sites[0]} does not say what the step is within {seconds:g} seconds", [0]
    )
