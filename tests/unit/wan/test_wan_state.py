import os
import stat

import pytest

from geojax.cli.main import run
from geojax.errors import UserError
from geojax.wan import EmulatedSite, EmulatedWan, WanSettings, emulate, namespaces, running, state
from geojax.wan.relay import compiled, is_running, start_time
from geojax.wan.state import EmulatedLink, Measurement, Relay


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "STATE_FOLDER", tmp_path)
    monkeypatch.setattr(emulate, "STATE_FOLDER", tmp_path)


def example(relay):
    sites = tuple(
        EmulatedSite(name=name, namespace=f"geojax.nowhere.{name}", address=f"10.77.0.{number}")
        for number, name in enumerate(("east", "west"), 1)
    )
    measured = Measurement(round_trip_seconds=0.021, bytes_per_second=(24e6, 24e6))
    link = EmulatedLink(sites=("east", "west"), relay=relay, measured=measured)
    settings = WanSettings(round_trip_seconds=0.021, bytes_per_second=25e6)
    return EmulatedWan(
        name="nowhere", settings=settings, shaper="relay", sites=sites, links=(link,)
    )


def test_what_was_saved_is_loaded_and_says_how_to_run_a_command():
    saved = example(Relay(process_id=os.getpid(), started=start_time(os.getpid()), cores=(0, 0)))
    saved.save()
    loaded = EmulatedWan.load("nowhere")
    assert loaded == saved
    assert loaded.site("west").command_prefix == ("ip", "netns", "exec", "geojax.nowhere.west")
    with pytest.raises(UserError, match="has no site 'mars', only east, west"):
        loaded.site("mars")


def test_what_is_gone_is_named():
    # The number of a process that lives, but another one than that which was started.
    other = Relay(process_id=os.getpid(), started=start_time(os.getpid()) - 1, cores=(0, 0))
    assert not is_running(other)
    example(other).save()
    with pytest.raises(UserError, match="'nowhere' is broken: the namespace"):
        running("nowhere")
    assert emulate.problems(EmulatedWan.load("nowhere"))[-1] == (
        "the relay of the link east-west has ended"
    )


def test_no_network_and_no_name():
    with pytest.raises(UserError, match="no emulated network 'nowhere' is up; geojax wan up"):
        running("nowhere")
    with pytest.raises(UserError, match=r"'\.\./x' names no emulated network"):
        EmulatedWan.load("../x")


@pytest.mark.parametrize("verb", ["up", "down"])
def test_whoever_is_not_root_is_told_so_in_one_line(verb, monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert run(["wan", verb, "--name", "nowhere"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "root" in line
    assert line.startswith("error: ")


def test_options_are_refused_under_their_names(capsys):
    assert run(["wan", "up", "--rtt", "21parsecs"]) == 2
    assert "geojax wan up: rtt: '21parsecs' is not" in capsys.readouterr().err
    assert run(["wan", "up", "--rates", "1gbit"]) == 2
    assert "unknown argument --rates; see geojax wan up --help" in capsys.readouterr().err


def test_a_machine_without_a_compiler_or_with_a_broken_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UserError, match="needs a C compiler where the kernel lacks netem"):
        compiled()
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'stdio.h: not found' >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(UserError, match=r"fails: stdio\.h: not found"):
        compiled()
    assert list((tmp_path / "geojax" / "wan").iterdir()) == []


def test_a_container_without_the_rights_is_told_which(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    refusing = tmp_path / "ip"
    refusing.write_text("#!/bin/sh\necho 'mount failed: Operation not permitted' >&2\nexit 1\n")
    refusing.chmod(refusing.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"Operation not permitted.*SYS_ADMIN and NET_ADMIN"):
        namespaces.require_namespaces()
