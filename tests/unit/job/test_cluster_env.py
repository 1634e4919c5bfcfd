import pytest

from geojax.errors import UserError
from geojax.job.cluster_env import ProcessSettings, complete, first_host

SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NODELIST": "gpu[07-08,11],login1",
}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}


def found(environment, host="pod", **given):
    settings = complete(ProcessSettings(**given), environment, host_name=lambda: host)
    return settings.process_id, settings.process_count, settings.coordinator


def test_nothing_said_is_one_process():
    assert found({}) == (None, 1, None)


def test_variables_fill_what_arguments_leave_open():
    environment = {
        "GEOJAX_COORDINATOR": "east1:1234",
        "GEOJAX_PROCESS_COUNT": "4",
        "GEOJAX_PROCESS_ID": "2",
        "GEOJAX_SITE": "east",
        "GEOJAX_SIMULATE_DEVICES": "4",
        "GEOJAX_START_TIMEOUT_SECONDS": "90s",
    }
    assert complete(ProcessSettings(), environment) == ProcessSettings(
        coordinator="east1:1234",
        process_count=4,
        process_id=2,
        site="east",
        simulated_devices=4,
        start_timeout_seconds=90,
    )
    assert found(environment, process_id=3) == (3, 4, "east1:1234")
    assert complete(ProcessSettings(site="west"), environment).site == "west"


def test_a_slurm_step():
    assert found(SLURM) == (5, 16, f"gpu07:{61440 + 4242 % 4096}")


def test_a_slurm_step_of_each_site_is_one_job_with_an_offset():
    environment = SLURM | {
        "GEOJAX_PROCESS_OFFSET": "16",
        "GEOJAX_PROCESS_COUNT": "32",
        "GEOJAX_COORDINATOR": "east1:1234",
    }
    assert found(environment) == (21, 32, "east1:1234")


def test_a_slurm_batch_script_is_no_step_and_one_task_no_job():
    batch_script = {key: value for key, value in SLURM.items() if "STEP" not in key}
    assert found(batch_script) == (None, 1, None)
    assert found(SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == (None, 1, None)


def test_arguments_come_before_slurm():
    assert found(SLURM, process_count=1) == (None, 1, None)
    assert found(SLURM, coordinator="a:1") == (5, 16, "a:1")


def test_an_indexed_kubernetes_job_finds_pod_0_by_its_name():
    environment = KUBERNETES | {"GEOJAX_PROCESS_COUNT": "8"}
    host = "train-3.train.lab.svc.cluster.local"
    assert found(environment, host) == (3, 8, "train-0.train.lab.svc.cluster.local:61440")
    assert found(environment | {"GEOJAX_COORDINATOR": "a:1"}, "other") == (3, 8, "a:1")


def test_the_pods_of_a_kubernetes_job_are_not_counted_for_us():
    with pytest.raises(UserError, match="set GEOJAX_PROCESS_COUNT"):
        found(KUBERNETES, "train-3.train")


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"process_count": 2}, "set GEOJAX_COORDINATOR"),
        ({"process_count": 2, "coordinator": "a:1"}, "set GEOJAX_PROCESS_ID"),
        ({"coordinator": "a:1"}, "set GEOJAX_PROCESS_COUNT"),
        ({"process_count": 2, "coordinator": "a:1", "process_id": 2}, "numbered from 0"),
        ({"process_count": 1, "process_id": 5}, "process_id=5, but the job has one process"),
        ({"process_id": 3}, "this is process 3 of a job, but of how many .* GEOJAX_PROCESS_COUNT"),
    ],
)
def test_what_is_missing_is_named(given, part):
    with pytest.raises(UserError, match=part):
        found({}, **given)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("GEOJAX_PROCESS_COUNT", "two"),
        ("GEOJAX_PROCESS_COUNT", "0"),
        ("GEOJAX_PROCESS_COUNT", "\uff12"),
        ("GEOJAX_PROCESS_ID", "-1"),
        ("GEOJAX_COORDINATOR", "a"),
        ("GEOJAX_COORDINATOR", "localhost:99999"),
        ("GEOJAX_BIND_ADDRESS", "0.0.0.0:5"),
        ("GEOJAX_SITE", "../../esc"),
        ("GEOJAX_KEY", "short"),
    ],
)
def test_impossible_variables_are_refused(variable, value):
    with pytest.raises(UserError, match=r"^GEOJAX_\* variables: "):
        found({variable: value})


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[001-004]", "n001"),
        ("n[7,9-12],m1", "n7"),
        ("n1,m[2-3]", "n1"),
        ("rack[1-2]-ib", "rack1-ib"),
    ],
)
def test_the_first_host_of_a_slurm_list(hosts, first):
    assert first_host(hosts) == first
