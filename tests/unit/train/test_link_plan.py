"""Settings that follow from a topology's link, and those that stay as they were without one."""

import pytest
import yaml

from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.planner.abstract_mesh import abstract_mesh
from geojax.planner.resolve.choices import resolved_plan
from geojax.planner.resolve.link_plan import link_lines
from geojax.planner.resolve.pipeline_plan import choose_hop_ticks
from geojax.planner.resolve.run_stages import chosen_layers
from geojax.planner.resolve.traced_run import accelerator_of_run
from geojax.step.config_plan import DEFAULT_BUCKET_BYTES

CONFIG = {
    "run_directory": "run",
    "steps": 10,
    "topology": "two-h100-sites",
    "model": "llama3-70b",
    "remat": "full",
    "parallelism": {"sequence": True},
    "data": {"sources": [{"name": "text", "prepared": "text"}]},
    "batch": {"global_batch_size": 1536, "sequence_length": 8192, "microbatches": 4},
}
REPLICAS = {"mesh": {"dc": 2, "data": 192, "tensor": 8}}
STAGES = {"mesh": {"dc": 2, "stage": 8, "data": 24, "tensor": 8}, "dc": {"role": "stage"}}
LONG = {"global_batch_size": 1536, "sequence_length": 8192, "microbatches": 32}


@pytest.fixture
def load(tmp_path):
    def loaded(*overrides, **changes):
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(CONFIG | changes))
        return RunConfig.load(path, overrides)

    return loaded


def planned(config):
    mesh = abstract_mesh(config.mesh.model_dump(), accelerator=accelerator_of_run(config))
    return resolved_plan(config, mesh)


def test_buckets_follow_from_the_link(load):
    config = load(**REPLICAS)
    plan = planned(config)
    assert plan.overlap_grad_reduce
    assert plan.bucket_layers > 1
    chosen, exposed = link_lines(config, plan)
    assert "overlap_grad_reduce true (auto), bucket_layers 8 (auto)" in chosen
    assert "0.22 s that no compute hides (4.0%), 0.063 s of it latency (1.1%), of a step" in exposed


def test_exposed_latency_that_is_long_for_a_step_is_warned_of(load):
    config = load(**REPLICAS, batch=CONFIG["batch"] | {"global_batch_size": 768, "microbatches": 2})
    _, exposed, warning = link_lines(config, planned(config))
    assert "0.19 s that no compute hides (7.0%), 0.087 s of it latency (3.1%), of a step" in exposed
    assert "larger batch.global_batch_size" in warning


@pytest.mark.parametrize(
    "changes",
    [
        {"topology": None},
        {"mesh": {"data": 384, "tensor": 8}, "topology": None},
        STAGES | {"batch": LONG},
    ],
    ids=["no topology", "one site", "sites are stages"],
)
def test_a_constant_stands_where_no_link_is_known_or_none_carries_gradients(load, changes):
    config = load(**(REPLICAS | changes))
    plan = planned(config)
    buckets = (plan.bucket_bytes, plan.bucket_layers, plan.overlap_grad_reduce)
    assert buckets == (DEFAULT_BUCKET_BYTES, 1, False)
    about_buckets = [line for line in link_lines(config, plan) if "gradients" in line]
    assert len(about_buckets) == (config.mesh.dc == 2 and config.dc.role == "data")


def test_simulated_devices_have_a_link_and_no_peak(load):
    config = load(mesh={"dc": 2, "data": 64, "tensor": 8}, simulate_devices=1024)
    plan = planned(config)
    assert not plan.overlap_grad_reduce
    assert plan.bucket_bytes > DEFAULT_BUCKET_BYTES
    assert link_lines(config, plan)[-1].endswith("the step's time is not known")


def test_given_settings_are_kept_and_the_warning_names_them(load):
    config = load(
        "--communication.bucket_bytes=16777216",
        "--communication.overlap_grad_reduce=false",
        **REPLICAS,
    )
    plan = planned(config)
    assert (plan.bucket_bytes, plan.overlap_grad_reduce) == (16777216, False)
    assert "leave communication.overlap_grad_reduce" in link_lines(config, plan)[-1]


def test_hops_take_two_ticks_where_that_is_faster(load):
    config = load(**STAGES, batch=LONG)
    choice = choose_hop_ticks(config, chosen_layers(config))
    assert choice.ticks == 2
    assert choice.costs is not None
    (line,) = link_lines(config, planned(config))
    assert line.startswith("pipeline over dc: hop_ticks 2 (auto): a hop takes ")

    near = load("--pipeline.hop_ticks", "1", **STAGES, batch=LONG)
    _, warning = link_lines(near, planned(near))
    assert "pipeline.hop_ticks auto" in warning

    unknown = load(**STAGES, batch=LONG, topology=None)
    assert choose_hop_ticks(unknown, chosen_layers(unknown)).ticks == 1
    (line,) = link_lines(unknown, planned(unknown))
    assert line.endswith("there is no topology")


def test_a_word_that_is_not_auto_is_refused(load):
    with pytest.raises(UserError, match=r"communication\.bucket_bytes"):
        load("--communication.bucket_bytes", "most")
    with pytest.raises(UserError, match=r"pipeline\.hop_ticks"):
        load("--pipeline.hop_ticks", "many")


@pytest.mark.parametrize(
    ("platform", "given", "made"),
    [
        ("cpu", "auto", "last_stage"),
        ("cpu", "positions", "positions"),
        ("gpu", "auto", "vocabulary"),
        ("gpu", "positions", "positions"),
        ("gpu", "last_stage", "last_stage"),
    ],
)
def test_stages_share_the_head_as_given_or_where_it_gains_on_gpus(load, platform, given, made):
    pipeline = {"schedule": "1f1b", "head": given}
    config = load(mesh=STAGES["mesh"], pipeline=pipeline, batch=LONG)
    mesh = abstract_mesh(config.mesh.model_dump(), platform=platform)
    assert resolved_plan(config, mesh).layout.pipeline.head == made


@pytest.mark.parametrize(("given", "made"), [("auto", 1), (2, 2)])
def test_parts_of_the_stream_are_as_given_and_one_on_cpus(load, given, made):
    sizes = {"dc": 2, "data": 192, "tensor": 2}
    config = load(mesh=sizes, parallelism={"sequence": True, "chunks": given})
    mesh = abstract_mesh(config.mesh.model_dump(), platform="cpu")
    assert resolved_plan(config, mesh).parallelism.chunks == made
