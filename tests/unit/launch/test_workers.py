"""Who is started where, and that each learns its place from what it is told."""

import io
import json
import os
import re
import shlex
import stat
import subprocess
import sys

import pytest

from geojax.cli.launch import LaunchCommand, _sites, run
from geojax.errors import UserError
from geojax.job.cluster_env import ProcessSettings, complete
from geojax.job.island_env import island_settings
from geojax.launch import Hosts, Output, as_islands, local_workers, supervise
from geojax.settings import validate
from geojax.wan import EmulatedSite, EmulatedWan, WanSettings


def told(worker):
    """What a process of geojax makes of its variables."""
    return complete(ProcessSettings(), worker.environment)


def workers(sites, each=1, devices=None, wan=None):
    processes = each if isinstance(each, tuple) else (each,) * len(sites)
    return local_workers(
        sites, processes, ["train"], simulated_devices=devices, grace_seconds=3, wan=wan
    )


def test_processes_on_this_machine_learn_their_places():
    started = workers(["east", "west"], each=2, devices=4)
    places = [told(worker) for worker in started]
    assert [place.process_id for place in places] == [0, 1, 2, 3]
    assert [place.site for place in places] == ["east", "east", "west", "west"]
    assert {place.process_count for place in places} == {4}
    assert {place.simulated_devices for place in places} == {4}
    (key,) = {place.key for place in places}
    assert len(key) == 32
    (coordinator,) = {place.coordinator for place in places}
    assert coordinator.startswith("127.0.0.1:")
    assert started[2].label == "west/2"
    assert str(started[2]) == "process 2 (site west)"


def test_sites_that_are_jobs_of_their_own_number_their_processes_each_from_zero(monkeypatch):
    monkeypatch.setenv("GEOJAX_ISLANDS_PORT", "61400")
    started = as_islands(workers(["east", "west"], each=2, devices=4))
    places = [told(worker) for worker in started]
    assert [place.process_id for place in places] == [0, 1, 0, 1]
    assert {place.process_count for place in places} == {2}
    assert len({place.coordinator for place in places}) == 2
    joined = [island_settings(worker.environment) for worker in started]
    assert [each.site for each in joined] == ["east", "east", "west", "west"]
    assert {each.sites for each in joined} == {("east", "west")}
    assert len({(each.key, each.coordinator) for each in joined}) == 1
    assert [each.port for each in joined] == [61400, 61400, 61402, 61402], "with two a site"
    assert [worker.label for worker in started] == ["east/0", "east/1", "west/2", "west/3"]


def test_sites_may_have_different_numbers_of_processes_and_have_as_many_devices(monkeypatch):
    monkeypatch.setenv("GEOJAX_ISLANDS_PORT", "61400")
    started = as_islands(workers(["east", "mid", "west"], each=(1, 2, 1), devices=2))
    places = [told(worker) for worker in started]
    assert [(place.process_id, place.process_count) for place in places] == [
        *((0, 1), (0, 2), (1, 2), (0, 1))
    ]
    assert [place.simulated_devices for place in places] == [4, 2, 2, 4]
    ports = [island_settings(worker.environment).port for worker in started]
    assert ports == [61400, 61401, 61401, 61403]
    with pytest.raises(UserError, match="3 devices of a site do not divide among the 2 processes"):
        workers(["east", "west"], each=(3, 2), devices=1)


def test_sites_of_an_emulated_network_run_in_their_namespaces():
    sites = tuple(
        EmulatedSite(name=name, namespace=f"ns-{name}", address=f"10.0.0.{place}")
        for place, name in enumerate(["east", "west"], 1)
    )
    wan = EmulatedWan(name="wan", settings=WanSettings(), shaper="none", sites=sites, links=())
    started = workers(["east", "west"], wan=wan, devices=1)
    assert started[1].command[:5] == ("ip", "netns", "exec", "ns-west", sys.executable)
    assert {told(worker).coordinator.split(":")[0] for worker in started} == {"10.0.0.1"}
    assert _sites(None, wan) == ["east", "west"]
    with pytest.raises(UserError, match="the emulated network 'wan' has 2 sites"):
        _sites("3", wan)
    with pytest.raises(UserError, match="has no site 'south'"):
        _sites("east,south", wan)


def test_gpus_are_shared_out(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,5")
    shares = [worker.environment["CUDA_VISIBLE_DEVICES"] for worker in workers(["a", "b"])]
    assert shares == ["0,1", "2,5"]
    unlike = [each.environment["CUDA_VISIBLE_DEVICES"] for each in workers(["a", "b"], (1, 2))]
    assert unlike == ["0,1", "2", "5"]
    assert "CUDA_VISIBLE_DEVICES" not in workers(["a", "b"], devices=2)[0].environment
    with pytest.raises(UserError, match=r"4 GPU\(s\) do not divide among 3 processes"):
        workers(["a", "b", "c"])


@pytest.mark.parametrize(
    ("asked", "sites"),
    [(None, ["east", "west"]), ("3", ["east", "west", "north"]), ("a,b_c", ["a", "b_c"])],
)
def test_sites_are_a_number_or_names(asked, sites):
    assert _sites(asked, None) == sites


@pytest.mark.parametrize(
    "asked", ["0", "9", "a,a", "a,", "a b", "-1", "\uff12", "a.b", "../x", "1,2"]
)
def test_what_is_no_list_of_sites_is_refused(asked):
    with pytest.raises(UserError, match=r"^--sites "):
        _sites(asked, None)


@pytest.mark.parametrize(
    ("changes", "launched", "part"),
    [
        ({}, [], "no command to launch"),
        ({}, ["trian", "x.yaml"], "'trian' is neither 'train' nor 'probe' nor a program"),
        ({"processes_per_site": [0]}, ["train"], "processes_per_site.0: input should be greater"),
        ({"processes_per_site": [1, 2]}, ["train"], "1 2: give one number for all sites, or with"),
        (
            {"processes_per_site": [1, 2], "islands": True, "sites": "3"},
            ["train"],
            "1 2: give one number for all sites, or with --islands one for each of the 3",
        ),
        ({"grace_seconds": "soon"}, ["train"], "'soon' is not a number of seconds"),
        ({"hosts": "h.yaml", "sites": "2"}, ["train"], "--hosts h.yaml says which sites"),
    ],
)
def test_mistakes_are_refused(changes, launched, part):
    with pytest.raises(UserError, match=part):
        run(validate(LaunchCommand, changes, "geojax launch"), launched)


SSH = """#!/bin/sh
# Runs what it is given on this machine; with -G says to which address it would connect.
for last; do :; done
last=${last#me@}
case " $* " in
    *" -G "*) ;;
    *) exec sh -c "$last" ;;
esac
case $last in
    localhost) echo "hostname localhost" ;;
    nowhere) echo "hostname nowhere.invalid" ;;
    behind) echo "hostname behind.invalid"; echo "proxyjump gate" ;;
    -*) echo "bad name" >&2; exit 255 ;;
    *) echo "hostname 10.1.0.1" ;;
esac
"""


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """An `ssh` that knows some hosts and connects to none."""
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def hosts_file(path, text):
    path.write_text(text)
    return Hosts.load(path)


def ssh_members(hosts, *command, islands=False):
    return hosts.workers(command, simulated_devices=None, grace_seconds=3, islands=islands)


HOSTS = """
sites:
  - {name: east, hosts: [me@east1, east2]}
  - {name: west, hosts: [west1]}
coordinator: 10.1.0.1:7000
directory: /shared/it's here
python: python3
"""


@pytest.mark.usefixtures("ssh")
def test_a_process_on_each_host(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth 1")
    started = ssh_members(hosts_file(tmp_path / "h.yaml", HOSTS), "train", "a b")
    assert [str(worker) for worker in started] == [
        "process 0 (site east, host me@east1)",
        "process 1 (site east, host east2)",
        "process 2 (site west, host west1)",
    ]
    *ssh, host, line = started[2].command
    assert (ssh[0], host) == ("ssh", "west1")
    *shell, script = shlex.split(line)
    assert shell == ["exec", "sh", "-c"]
    words = shlex.split(script.partition("&& export GEOJAX_KEY && ")[2])
    assert words[:5] == ["cd", "/shared/it's here", "&&", "exec", "env"]
    variables = dict(word.split("=", 1) for word in words[5 : words.index("python3")])
    assert variables["NCCL_SOCKET_IFNAME"] == "eth 1"
    place = complete(ProcessSettings(), variables)
    assert (place.process_id, place.process_count, place.site) == (2, 3, "west")
    assert place.coordinator == "10.1.0.1:7000"
    assert words[-3:] == ["3", "train", "a b"]


@pytest.mark.usefixtures("ssh")
def test_the_line_runs_in_a_shell_as_it_was_meant(tmp_path):
    names = "os.environ['GEOJAX_SITE'], os.environ['GEOJAX_KEY']"
    program = f"import os, sys; print({names}, os.getcwd(), sys.argv[1:])"
    hosts = Hosts.model_validate(
        {
            "sites": [{"name": "east", "hosts": ["here"]}],
            "directory": str(tmp_path),
            "python": sys.executable,
        }
    )
    (worker,) = ssh_members(hosts, sys.executable, "-c", program, "a 'b' $HOME")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(worker.command, text=True, **pipes) as process:
        process.stdin.write(f"{worker.secret}\n")
        process.stdin.flush()
        told = process.stdout.read()
    assert told == f"""east {worker.secret} {tmp_path} ["a 'b' $HOME"]\n"""
    assert worker.secret not in " ".join(worker.command)


TOLD = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.mark.usefixtures("ssh")
def test_sites_over_ssh_are_jobs_of_their_own_with_a_key_that_no_command_line_shows(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("GEOJAX_KEY", "of another run, and longer than 16")
    monkeypatch.setenv("GEOJAX_ISLANDS_PORT", "61400")
    hosts = Hosts.model_validate(
        {
            "sites": [
                {"name": "east", "hosts": ["e1", "e2"]},
                {"name": "west", "hosts": ["w1", "e2"]},
            ],
            "directory": str(tmp_path),
        }
    )
    started = ssh_members(hosts, sys.executable, "-c", TOLD, islands=True)
    shown = io.StringIO()
    outcome = supervise(started, Output(started, shown, sys.stderr), grace_seconds=3)
    assert outcome.exit_code == 0
    lines = (line.split("|", 1) for line in shown.getvalue().splitlines())
    told = {mark.strip(): json.loads(text) for mark, text in lines}
    assert sorted(told) == ["east/0", "east/1", "west/2", "west/3"]
    places = {label: complete(ProcessSettings(), each) for label, each in told.items()}
    assert [places[label].process_id for label in sorted(told)] == [0, 1, 0, 1]
    assert {place.process_count for place in places.values()} == {2}
    joined = {label: island_settings(each) for label, each in told.items()}
    assert [joined[label].site for label in sorted(told)] == ["east", "east", "west", "west"]
    assert [joined[label].port for label in sorted(told)] == [61400, 61400, 61400, 61401]
    (together,) = {(each.sites, each.coordinator, each.key) for each in joined.values()}
    sites, coordinator, key = together
    assert (sites, coordinator, len(key)) == (("east", "west"), "10.1.0.1:61439", 32)
    assert not any(key in " ".join(worker.command) for worker in started)


@pytest.mark.usefixtures("ssh")
def test_islands_over_ssh_may_have_different_numbers_of_hosts(tmp_path):
    started = ssh_members(hosts_file(tmp_path / "h.yaml", HOSTS), "train", islands=True)
    assert [worker.label for worker in started] == ["east/0", "east/1", "west/2"]
    counts = [re.search(r"GEOJAX_PROCESS_COUNT=(\d)", " ".join(each.command)) for each in started]
    assert [found[1] for found in counts] == ["2", "2", "1"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("sites: [{name: east, hosts: []}]", "sites.0.hosts"),
        ("sites: [{name: a, hosts: [x]}, {name: a, hosts: [y]}]", "the same name: a, a"),
        ("sites: [{name: a, hosts: [x]}]\ncoordinator: x", "coordinator: 'x' is no host:port"),
        ("sites: [{name: a, hosts: [x]}]\nport: 1", "port: unknown key"),
        (
            "sites: [{name: a, hosts: [localhost, b]}]",
            "the first host, localhost: localhost leads every host to itself; give an address",
        ),
        (
            "sites: [{name: a, hosts: [x, b]}]\ncoordinator: 127.0.0.1:1",
            "coordinator: 127.0.0.1 leads every host to itself",
        ),
        (
            "sites: [{name: a, hosts: [x, me@nowhere]}]",
            "host me@nowhere: nowhere.invalid has no address here",
        ),
        ("sites: [{name: a, hosts: [x, -x]}]", "sites.0.hosts.1: '-x' is no host for ssh"),
        ("sites: [{name: a, hosts: [me@-x]}]", "'me@-x' is no host for ssh"),
        ("sites: [{name: a, hosts: ['-oProxyCommand=x@y']}]", "is no host for ssh"),
        ("sites: [{name: a, hosts: ['x y']}]", "is no host for ssh"),
        ("sites: [{name: ../a, hosts: [x]}]", "sites.0.name: '../a' is no name of a site"),
        ("sites: [{name: a, hosts: [x]}]\ncoordinator: $(x):5", "x\\)' is no host's name"),
        ("sites: [{name: a, hosts: [x]}]\ncoordinator: -x:5", "'-x' is no host's name"),
    ],
)
@pytest.mark.usefixtures("ssh")
def test_a_hosts_file_with_a_mistake(tmp_path, text, part):
    with pytest.raises(UserError, match=part):
        ssh_members(hosts_file(tmp_path / "hosts.yaml", text), "train")


@pytest.mark.usefixtures("ssh")
def test_the_coordinator_is_where_ssh_finds_the_first_host(tmp_path):
    text = "sites: [{name: a, hosts: [alias, behind]}]"
    started = ssh_members(hosts_file(tmp_path / "h.yaml", text), "train")
    assert "GEOJAX_COORDINATOR=10.1.0.1:61440" in started[1].command[-1]


def test_without_ssh_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="ssh cannot be run"):
        ssh_members(hosts_file(tmp_path / "h.yaml", HOSTS), "train")
