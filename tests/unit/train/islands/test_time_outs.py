"""The table of times after which sites act."""

from geojax.config.run_config import RunConfig
from geojax.job.cluster_env import VARIABLES, ProcessSettings
from geojax.settings import leaves_by_key
from geojax.train.islands.time_outs import time_out_lines


def test_each_time_has_the_key_that_sets_it():
    config = RunConfig.model_validate(
        {
            "run_directory": "runs/mine",
            "steps": 10,
            "mesh": {"dc": 3},
            "dc": {"join": "islands"},
            "islands": {"on_loss": "go_on", "lease": {"path": "record"}, "join_pause": 12},
            "model": "tiny",
            "data": {"sources": [{"name": "sums", "prepared": "unused"}]},
            "batch": {"global_batch_size": 6, "sequence_length": 32},
        }
    )
    lines = time_out_lines(config, ProcessSettings(heartbeat_timeout_seconds=9))
    assert lines[0].endswith("9 s  GEOJAX_HEARTBEAT_TIMEOUT")
    assert lines[1].endswith("6 s  2/3 of GEOJAX_HEARTBEAT_TIMEOUT")
    assert lines[4].endswith("27 s  3 x GEOJAX_HEARTBEAT_TIMEOUT")
    assert lines[5].endswith("12 s  islands.join_pause")
    known = {*VARIABLES.values(), *(name for name, _ in leaves_by_key(config.model_dump()))}
    assert {line.split()[-1] for line in lines} <= known
