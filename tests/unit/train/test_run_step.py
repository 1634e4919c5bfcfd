"""The step of islands: resolved by the first site for the devices of all, and told to the others.

Each site is a thread of one process, which makes no difference to the rendezvous.
"""

import base64
import concurrent.futures
import socket
import zlib

import jax
import pytest
from support.ports import free_port

from geojax.config.layout import Layout
from geojax.config.run_config import RunConfig
from geojax.errors import MissingProcessesError, UserError
from geojax.job.island_env import IslandSettings
from geojax.step.resolved import Origin, Step
from geojax.step.step_file import MOST_BYTES, origin_of, read_step, write_step
from geojax.train import run_step
from geojax.train.agreed_step import KeptStep, keep, step_of_note
from geojax.train.run_step import step_of_sites
from geojax.transport import meet

SITES = ("east", "west", "north")
CONTENT = {
    "run_directory": "unused",
    "steps": 10,
    "model": {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 64,
        "max_position_embeddings": 32,
    },
    "batch": {"global_batch_size": 6, "sequence_length": 32},
    "data": {"sources": [{"name": "sums", "prepared": "unused"}]},
    "mesh": {"dc": len(SITES)},
    "dc": {"join": "islands"},
}
CONFIG = RunConfig.model_validate(CONTENT)


@pytest.fixture
def coordinator():
    return f"127.0.0.1:{free_port()}"


def step_for(devices, *notes):
    layout = Layout(batch=CONTENT["batch"], mesh=CONTENT["mesh"])
    return Step(layout=layout, origin=origin_of(CONFIG, None, devices), notes=notes)


def place(coordinator, site):
    return IslandSettings(
        site=site, sites=SITES, coordinators=(coordinator,), key="k" * 16, address="127.0.0.1"
    )


def all_sites(coordinator, folder, resolve, *, configs=(), seconds=30.0, sites=SITES):
    """The step of each site, or the error that it ends with."""

    def call(site):
        config = dict(configs).get(site, CONFIG)
        path = folder / f"{site}.yaml"
        try:
            return step_of_sites(config, path, place(coordinator, site), seconds, resolve)
        except (UserError, MissingProcessesError) as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(sites)) as threads:
        return list(threads.map(call, sites))


def test_the_first_site_resolves_once_for_the_devices_of_all(coordinator, tmp_path):
    calls = []

    def resolve(devices):
        calls.append(devices)
        return KeptStep(step_for(devices))

    first, *others = all_sites(coordinator, tmp_path, resolve)
    (devices,) = calls
    assert len(devices) == len(SITES) * jax.device_count()
    assert {each.device_kind for each in devices} == {jax.devices()[0].device_kind}
    assert [each.count for each in first.step.origin.devices] == [jax.device_count()] * len(SITES)
    assert others == [first, first]


def test_sites_wait_for_a_step_that_takes_long(coordinator, tmp_path, monkeypatch):
    monkeypatch.setattr(run_step, "_MEET_SECONDS", 0.05)
    met = []
    monkeypatch.setattr(run_step, "meet", lambda *a, **k: met.append(1) or meet(*a, **k))

    def resolve(devices):
        while len(met) < 4 * len(SITES):
            pass
        return KeptStep(step_for(devices))

    first, *others = all_sites(coordinator, tmp_path, resolve)
    assert others == [first, first]


def test_a_step_that_cannot_be_ends_all_sites_with_the_reason(coordinator, tmp_path):
    def refuse(devices):
        raise UserError("layers do not divide")

    assert {str(each) for each in all_sites(coordinator, tmp_path, refuse)} == {
        "layers do not divide"
    }


def test_another_config_ends_all_sites_and_is_named(coordinator, tmp_path):
    other = RunConfig.model_validate(CONTENT | {"precision": "fp32"})
    found = all_sites(coordinator, tmp_path, step_for, configs={"west": other})
    host = socket.gethostname()
    assert "site east (host" in str(found[1])
    for site, error in zip(("east", "north"), found[::2], strict=True):
        named = f"site west (host {host}) has another precision than site {site}, which has"
        assert named in str(error)


def test_a_site_that_does_not_come_is_named(coordinator, tmp_path):
    found = all_sites(coordinator, tmp_path, step_for, seconds=1.0, sites=SITES[:2])
    for error in found:
        assert isinstance(error, MissingProcessesError)
        assert str(error).endswith("missing process 2 (site north)")


def test_a_site_that_is_lost_while_the_first_resolves_is_named(coordinator, tmp_path, monkeypatch):
    def lost(island, *arguments, **options):
        if island.site == "north" and "key" in options:
            raise MissingProcessesError("it has ended", [2])
        return meet(island, *arguments, **options)

    monkeypatch.setattr(run_step, "meet", lost)
    found = all_sites(
        coordinator, tmp_path, lambda devices: KeptStep(step_for(devices)), seconds=1.0
    )
    for error in found[:2]:
        assert str(error).endswith("missing process 2 (site north)")


def test_each_site_keeps_the_step_and_the_first_decides(coordinator, tmp_path):
    def resolve(devices):
        return KeptStep(step_for(devices, "new"))

    devices = len(SITES) * jax.devices()
    write_step(step_for(devices, "new"), tmp_path / "west.yaml")
    write_step(step_for(devices, "old"), tmp_path / "north.yaml")
    first, west, north = all_sites(coordinator, tmp_path, resolve)
    assert first.is_new
    assert not west.is_new
    assert north.is_new
    lines = []
    for site, kept in (("west", west), ("north", north)):
        keep(kept, tmp_path / f"{site}.yaml", lines.append)
        assert read_step(tmp_path / f"{site}.yaml") == first.step
    (line,) = lines
    assert "resolved anew, for other choices of site east; the earlier one is north.1.yaml" in line
    assert read_step(tmp_path / "north.1.yaml").notes == ("old",)


def test_a_site_names_what_differs_from_its_file(coordinator, tmp_path):
    earlier = step_for(len(SITES) * jax.devices())
    origin = Origin(**earlier.origin.model_dump() | {"geojax": "0"})
    write_step(earlier.model_copy(update={"origin": origin}), tmp_path / "west.yaml")
    _, west, _ = all_sites(coordinator, tmp_path, lambda devices: KeptStep(step_for(devices)))
    assert (west.is_new, west.replaces) == (True, "geojax")


@pytest.mark.parametrize(
    "note",
    [
        "",
        "{}",
        '{"step": "%%%"}',
        '{"step": "AAAA"}',
        '{"step": 3, "run": "rm"}',
        pytest.param(None, id="a bomb"),
    ],
)
def test_a_text_that_is_no_step_is_one_line(note):
    if note is None:
        packed = base64.b64encode(zlib.compress(b" " * (4 * MOST_BYTES), 9)).decode()
        note = f'{{"step": "{packed}"}}'
    with pytest.raises(UserError, match="site east tells a step that cannot be read") as raised:
        step_of_note(note, "site east")
    assert "\n" not in str(raised.value)
