"""A plan of sites of unlike speeds, written as a config and trained as it is."""

import concurrent.futures

import jax
import numpy as np
import pytest
import yaml
from support.resolving import island_run
from support.small_models import make_batch

from geojax.cli.main import run
from geojax.config.run_config import RunConfig
from geojax.islands.island_plan import make_site_mesh
from geojax.transport import loopback

NAMES = ("fast", "slow")
TOPOLOGY = {
    "sites": [
        {
            "name": name,
            "hosts": 1,
            "accelerators_per_host": 1,
            "accelerator": {
                "name": "simulated",
                "memory_bytes": "40MB",
                "peak_flops_per_second": {"float32": peak},
            },
        }
        for name, peak in zip(NAMES, ("50GFLOP/s", "25GFLOP/s"), strict=True)
    ],
    "links": [{"sites": list(NAMES), "round_trip_seconds": "1ms", "bytes_per_second": "1Gbit/s"}],
}
CONFIG = {
    "run_directory": "unused",
    "steps": 2,
    "simulate_devices": 2,
    "mesh": {"dc": 2},
    "model": {
        "num_hidden_layers": 6,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "vocab_size": 61,
        "max_position_embeddings": 32,
    },
    "data": {"sources": [{"name": "sums", "prepared": "unused"}]},
    "batch": {"global_batch_size": 4, "sequence_length": 32},
    "precision": "fp32",
    "optimizer": {"warmup_steps": 1},
}


@pytest.fixture
def planned(tmp_path):
    """The config that `geojax plan` writes for stages that differ in speed."""
    topology, config, best = (tmp_path / f"{name}.yaml" for name in ("sites", "run", "best"))
    topology.write_text(yaml.safe_dump(TOPOLOGY))
    config.write_text(yaml.safe_dump(CONFIG | {"topology": str(topology)}))
    given = ("--joins", "islands", "--roles", "stage", "--rows", "1", "--output", str(best))
    assert run(["plan", str(config), *given]) == 0
    return RunConfig.load(best)


def test_stages_of_unlike_speeds_train_with_layers_in_proportion(planned):
    assert planned.simulate_devices == 1, "one process in each site"
    fast, slow = planned.pipeline.layers
    assert fast + slow == 6
    assert fast > slow
    runs = []
    for transport in loopback(2):
        transport.site_names = NAMES
        mesh = make_site_mesh(planned, [jax.devices()[transport.site]])
        runs.append(island_run(planned, mesh, transport))
    batch = make_batch(planned.model, rows=4)

    def step(site):
        none = {"stop": False, "save": False}
        return runs[site].step(runs[site].initial_state(), batch, none)[1]["loss"]

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        first, second = map(float, threads.map(step, range(2)))
    assert first == second
    assert first == pytest.approx(np.log(61), rel=0.1), "the loss of random weights"
