"""launch/slurm.sbatch and launch/kubernetes.yaml, as far as can be told without a cluster."""

import os
import stat
import subprocess
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from support.jobset import JobSet

from geojax.exit_codes import FENCED, FINAL, USAGE
from geojax.job.cluster_env import ProcessSettings, complete
from geojax.job.island_env import ISLANDS_PORT, island_settings

LAUNCH = Path(__file__).resolve().parents[3] / "launch"
KEY = "0123456789abcdef" * 2

# What SLURM's own do for a step of one component, on this machine.
SRUN = """#!/usr/bin/env bash
echo "srun $*" >>"$LOG"
while [[ $1 == --* ]]; do
    [[ $1 == --nodes=* ]] && tasks=${1#*=}
    shift
done
code=0
for ((task = 0; task < tasks; task++)); do
    SLURM_STEP_NUM_TASKS=$tasks SLURM_PROCID=$task SLURM_STEP_NODELIST=n "$@" || code=$?
done
exit "$code"
"""
SCONTROL = """#!/bin/sh
case $1 in
    show) printf 'east7\\neast8\\n' ;;
    *) echo "scontrol $*" >>"$LOG" ;;
esac
"""
TRAIN = """#!/usr/bin/env bash
told=$(env | grep -E '^(GEOJAX|SLURM)_' | tr '\\n' ';')
echo "train $*;$told" >>"$LOG"  # in one piece: the sites write at the same time
[[ $GEOJAX_SITE != "$FAILING" ]] || exit "$CODE"
"""


@pytest.fixture
def submit(tmp_path):
    """Runs the batch script as SLURM would; gives the exit code and the log's lines."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "geojax": TRAIN}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(stat.S_IRWXU)

    def submit(script="slurm.sbatch", **variables):
        environment = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "LOG": str(tmp_path / "log"),
            "GEOJAX": str(tmp_path / "geojax"),
            "SLURM_JOB_ID": "4242",
            "SLURM_HET_SIZE": "2",
            "SLURM_JOB_NUM_NODES_HET_GROUP_0": "2",
            "SLURM_JOB_NUM_NODES_HET_GROUP_1": "3",
            "SLURM_JOB_NODELIST_HET_GROUP_0": "east[7-8]",
            "FAILING": "",
        }
        ended = subprocess.run(
            ["bash", LAUNCH / script, "run.yaml", "--steps", "7"],
            env=environment | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        log = tmp_path / "log"
        return ended, log.read_text().splitlines() if log.exists() else []

    return submit


def test_every_task_of_a_slurm_job_learns_its_place(submit):
    ended, log = submit()
    assert (ended.returncode, ended.stderr) == (0, "")
    tasks = [line.split(";") for line in log if line.startswith("train")]
    assert {task[0] for task in tasks} == {"train train run.yaml --steps 7"}
    places = [
        complete(ProcessSettings(), dict(word.split("=", 1) for word in task[1:] if word))
        for task in tasks
    ]
    places.sort(key=lambda place: place.process_id)
    assert [place.process_id for place in places] == [0, 1, 2, 3, 4]
    assert [place.site for place in places] == ["east"] * 2 + ["west"] * 3
    assert {place.process_count for place in places} == {5}
    (key,) = {place.key for place in places}
    assert len(key) == 32
    assert {place.coordinator for place in places} == {f"east7:{61440 + 4242 % 4096}"}
    steps = sorted(line for line in log if line.startswith("srun"))
    assert ["--het-group=0" in steps[0], "--het-group=1" in steps[1]] == [True, True]


@pytest.mark.parametrize(("code", "runs"), [(1, 3), (137, 3), *((code, 1) for code in FINAL)])
def test_a_slurm_job_starts_again_what_failed_but_not_after_bad_input(submit, code, runs):
    ended, log = submit(FAILING="west", CODE=str(code), RESTARTS="2")
    assert ended.returncode == code
    assert sum("--het-group=0" in line for line in log) == runs
    assert ended.stderr.count("restart") == runs - 1


def test_a_slurm_job_with_other_components_than_sites(submit):
    ended, log = submit(SITES="east west north")
    assert (ended.returncode, log) == (2, [])
    assert "the job has 2 component(s), but SITES names 3: east west north" in ended.stderr


@pytest.fixture
def submit_island(submit, tmp_path):
    """Runs the batch script of one site, with a job of its own."""
    (tmp_path / "key").write_text(KEY + "\n")

    def submit_island(site, **variables):
        job = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "east[7-8]"}
        own = {"SITE": site, "KEY_FILE": str(tmp_path / "key"), **job}
        return submit("slurm-island.sbatch", **own | variables)

    return submit_island


def test_every_task_of_two_slurm_jobs_learns_its_place_among_islands(submit_island):
    ended, _ = submit_island("east")
    assert ended.stdout == (
        "the other sites need COORDINATORS=east7:61439, with the address by which they reach it\n"
    )
    ended, log = submit_island("west", COORDINATORS="10.1.0.7:61439", SLURM_JOB_ID="4343")
    assert (ended.returncode, ended.stderr) == (0, "")
    told = [
        dict(word.split("=", 1) for word in line.split(";")[1:] if word)
        for line in log
        if line.startswith("train")
    ]
    places = [(island_settings(each), complete(ProcessSettings(), each)) for each in told]
    places.sort(key=lambda both: (both[0].site, both[1].process_id))
    assert [island.site for island, _ in places] == ["east"] * 2 + ["west"] * 2
    assert [place.process_id for _, place in places] == [0, 1, 0, 1]
    assert {place.process_count for _, place in places} == {2}
    assert {(island.sites, island.key) for island, _ in places} == {(("east", "west"), KEY)}
    assert [island.coordinator for island, _ in places[1:3]] == ["east7:61439", "10.1.0.7:61439"]
    assert {island.port for island, _ in places} == {61400}


def test_islands_under_slurm_that_go_on_know_the_coordinator_of_each(submit_island):
    coordinators = "10.1.0.7:61439,10.2.0.1:61439"
    for site in ("east", "west"):
        _, log = submit_island(site, COORDINATORS=coordinators)
    words = [word for line in log for word in line.split(";") if "COORDINATORS" in word]
    assert words == [f"GEOJAX_ISLANDS_COORDINATORS={coordinators}"] * 4


def test_an_island_under_slurm_starts_again_what_failed_then_is_queued_again(submit_island):
    ended, log = submit_island("east", FAILING="east", CODE="1", RESTARTS="2")
    assert ended.returncode == 1
    assert [line.split()[0] for line in log if not line.startswith("train")] == [
        *["srun"] * 3,
        "scontrol",
    ]
    assert log[-1] == "scontrol requeue 4242"
    assert ended.stderr.splitlines()[-1].endswith("exit code 1: queued again, 1 of 3")


@pytest.mark.parametrize("code", FINAL)
def test_an_island_under_slurm_ends_for_good_where_another_try_is_not_wanted(submit_island, code):
    ended, log = submit_island("east", FAILING="east", CODE=str(code))
    assert (ended.returncode, ended.stderr) == (code, "")
    assert [line.split()[0] for line in log] == ["srun", "train", "train"]


@pytest.mark.parametrize(("queued", "requeues"), [("2", 1), ("3", 0)])
def test_an_island_under_slurm_is_queued_again_so_often(submit_island, queued, requeues):
    variables = {"FAILING": "east", "CODE": "4", "RESTARTS": "0", "SLURM_RESTART_COUNT": queued}
    ended, log = submit_island("east", **variables)
    assert ended.returncode == FENCED
    assert sum(line.startswith("scontrol requeue") for line in log) == requeues


def test_an_hour_of_training_forgets_the_failures_before_it(submit_island, tmp_path):
    seconds = tmp_path / "seconds"
    seconds.write_text("\n".join(map(str, (0, 10, 20, 3700, 3700, 3710))))
    (tmp_path / "date").write_text(f"#!/bin/sh\nhead -n 1 {seconds}\nsed -i 1d {seconds}\n")
    (tmp_path / "date").chmod(stat.S_IRWXU)
    ended, log = submit_island("east", FAILING="east", CODE="1", RESTARTS="1", REQUEUES="0")
    assert sum(line.startswith("srun") for line in log) == 3
    assert (ended.returncode, ended.stderr.count("restart 1 of 1")) == (1, 2)


@pytest.mark.parametrize(
    ("site", "variables", "told"),
    [
        ("north", {}, "SITE 'north' is none of SITES: east west"),
        ("", {}, "SITE '' is none of SITES"),
        ("east", {"KEY_FILE": "/nowhere"}, "KEY_FILE '/nowhere' is no file with the key"),
        ("west", {}, "COORDINATORS must say where east is reached: 10.1.0.7:61439"),
    ],
)
def test_an_island_under_slurm_says_what_is_missing(submit_island, site, variables, told):
    ended, log = submit_island(site, **variables)
    assert (ended.returncode, log) == (2, [])
    assert told in ended.stderr


@pytest.mark.parametrize("script", ["slurm.sbatch", "slurm-island.sbatch"])
def test_a_batch_script_is_one_of_bash(script):
    subprocess.run(["bash", "-n", LAUNCH / script], check=True)


def variables_of(container):
    secret = {"secretKeyRef": {"name": "geojax-key", "key": "key"}}
    return {
        each["name"]: each.get("value", KEY if each.get("valueFrom") == secret else None)
        for each in container["env"]
    }


def test_every_pod_of_an_island_learns_its_place():
    jobset = yaml.safe_load((LAUNCH / "kubernetes-island.yaml").read_text())
    JobSet.model_validate(jobset)
    name, network = jobset["metadata"]["name"], jobset["spec"]["network"]
    assert network["publishNotReadyAddresses"], "pods find the first one before it is ready"
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    variables = variables_of(container)
    first = f"{name}-{replicated['name']}-0-0.{name}"
    island = island_settings(variables)
    assert (island.site, island.sites, island.key) == ("east", ("east", "west"), KEY)
    assert island.coordinator == f"{first}:{ISLANDS_PORT}"
    for index in range(job["completions"]):
        scheduled = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": str(index)}
        host = f"{name}-{replicated['name']}-0-{index}.{name}"
        place = complete(ProcessSettings(), variables | scheduled, host_name=lambda host=host: host)
        assert (place.process_id, place.process_count) == (index, job["completions"])
        assert place.coordinator == f"{first}:61440"


def test_the_jobset_has_the_fields_of_a_jobset_and_no_others():
    text = (LAUNCH / "kubernetes.yaml").read_text()
    JobSet.model_validate(yaml.safe_load(text))
    for right, wrong, part in (
        ("restartPolicy: Never", "restartPolicy: Always", "restartPolicy"),
        ("maxRestarts: 3", "maxRestart: 3", "maxRestart"),
        ('value: "4"', "value: 4", "value"),
        ("name: badInput", "name: bad-input", "name"),
        ("onExitCodes:", "exitCodes:", "exitCodes"),
        ("emptyDir:", "emptyDirectory:", "emptyDirectory"),
        ("    - name: west", "    - name: east", "one name"),
        ("name: geojax\nspec", f"name: {'g' * 60}\nspec", "longer than a host's name"),
    ):
        assert text.count(right) >= 1, right
        with pytest.raises(ValidationError, match=part):
            JobSet.model_validate(yaml.safe_load(text.replace(right, wrong)))


def test_every_pod_of_the_jobset_learns_its_place():
    jobset = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    name, places, hosts = jobset["metadata"]["name"], [], []
    for replicated in jobset["spec"]["replicatedJobs"]:
        job, site = replicated["template"]["spec"], replicated["name"]
        assert (replicated["replicas"], job["completionMode"]) == (1, "Indexed")
        assert job["parallelism"] == job["completions"]
        pod = job["template"]["spec"]
        # Kubernetes asks for Never where a pod failure policy stands.
        assert pod["restartPolicy"] == "Never"
        assert pod["nodeSelector"] == {"topology.kubernetes.io/region": site}
        (container,) = pod["containers"]
        variables = variables_of(container)
        assert all(isinstance(value, str) for value in variables.values())
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        for index in range(job["completions"]):
            host = f"{name}-{site}-0-{index}.{name}"
            hosts.append(host)
            scheduled = {
                "KUBERNETES_SERVICE_HOST": "10.0.0.1",
                "JOB_COMPLETION_INDEX": str(index),
            }
            place = complete(
                ProcessSettings(), variables | scheduled, host_name=lambda host=host: host
            )
            assert (place.site, place.key) == (site, KEY)
            places.append(place)
    assert [place.process_id for place in places] == list(range(len(places)))
    assert {place.process_count for place in places} == {len(places)}
    assert {place.coordinator for place in places} == {f"{hosts[0]}:61440"}


@pytest.mark.parametrize("jobset", ["kubernetes.yaml", "kubernetes-island.yaml"])
def test_a_jobset_restarts_but_not_after_bad_input(jobset):
    spec = yaml.safe_load((LAUNCH / jobset).read_text())["spec"]
    (rule,) = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    for replicated in spec["replicatedJobs"]:
        job = replicated["template"]["spec"]
        assert job["backoffLimit"] == 0, "one pod alone cannot join a run that goes on"
        (rule,) = job["podFailurePolicy"]["rules"]
        assert rule == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [USAGE]}}
