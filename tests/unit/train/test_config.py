import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geojax.config.layout_sections import BatchSettings
from geojax.config.pipeline_settings import PipelineSettings, check_stages
from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.runtime import ProcessSettings
from geojax.train.start import start

MINIMAL = """
run_directory: runs/x
steps: 10
model: tiny
data: {}
batch: {global_batch_size: 8, sequence_length: 64}
"""


def load(tmp_path, text=MINIMAL, *overrides):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return RunConfig.load(path, overrides)


def test_defaults_make_a_run_on_one_device(tmp_path):
    config = load(tmp_path)
    assert config.mesh.devices == 1
    assert config.precision == "bf16"
    assert config.model.num_hidden_layers > 0


def test_overrides_go_anywhere_and_values_are_yaml(tmp_path):
    config = load(
        tmp_path,
        MINIMAL,
        "--optimizer.peak_learning_rate",
        "1e-3",
        "--mesh.dc=2",
        "--communication.gradient_compression",
        "int8",
        "--sample.prompts",
        "['a', 'b']",
    )
    assert config.optimizer.peak_learning_rate == 1e-3
    assert config.mesh.dc == 2
    assert config.communication.gradient_compression == "int8"
    assert config.sample.prompts == ("a", "b")


def test_a_preset_keeps_what_is_not_overridden(tmp_path):
    plain = load(tmp_path)
    changed = load(tmp_path, MINIMAL, "--model.num_hidden_layers", "2")
    assert changed.model.num_hidden_layers == 2
    assert changed.model.hidden_size == plain.model.hidden_size


def test_a_resolved_config_reads_back_as_itself(tmp_path):
    import yaml

    config = load(tmp_path, MINIMAL, "--mesh.dc", "2")
    again = load(tmp_path, yaml.safe_dump(config.model_dump(mode="json")))
    assert again == config


SOURCES = "--data.sources=[{name: wiki, prepared: data/wiki}]"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("--mesh.data", "3"), "6 or 9 would"),
        (("--mesh.data", "16"), "; 16 would"),
        (("--batch.microbatches", "3"), "microbatches=3 = 3; 6 or 9 would"),
        (("--mesh.stage", "2", "--zero.stage", "2"), "zero.stage=2 requires one pipeline stage"),
        (
            ("--communication.overlap_param_gather", "true"),
            "overlap_param_gather requires pipeline stages of one program",
        ),
        (
            (
                *("--communication.overlap_param_gather=true", "--mesh.stage=2"),
                *("--pipeline.schedule=interleaved", "--pipeline.virtual_stages=2"),
                *("--batch.microbatches=4", "--zero.stage=0"),
            ),
            "overlap_param_gather requires zero.stage=1",
        ),
        (("--pipeline.head", "positions"), "pipeline.head=positions requires mesh.stage of 2"),
        (
            ("--mesh.dc=2", "--dc.role=stage", "--communication.overlap_grad_reduce=true"),
            "overlap_grad_reduce requires dc.role=data",
        ),
        (("--communication.gradient_compression", "int4"), "communication.gradient_compression: "),
        (
            ("--communication.gradient_compression=int8", "--mesh.dc=2", "--dc.role=stage"),
            "communication.gradient_compression=int8 requires dc.role=data: ",
        ),
        (
            (
                "--communication.gradient_compression=bf16",
                "--mesh.dc=2",
                "--zero.across_sites=true",
            ),
            "communication.gradient_compression=bf16 requires zero.across_sites=false",
        ),
        (
            ("--batch.ramp={start: 2, increment: 2, sequences: 64}",),
            "ramp from 2 sequences by 2 requires batch.microbatches of 2 or more",
        ),
        (
            (
                "--batch.microbatches=4",
                "--batch.ramp={start: 3, increment: 2, sequences: 64}",
            ),
            "in whole microbatches of 2 sequences; from 4 by 2 would",
        ),
        (
            (
                "--batch.microbatches=4",
                "--batch.ramp={start: 8, increment: 2, sequences: 64}",
            ),
            "does not lead to global_batch_size=8 in whole microbatches of 2 sequences; from 6 by",
        ),
        (
            (
                "--batch={global_batch_size: 512, sequence_length: 64, microbatches: 512, "
                "ramp: {start: 1, increment: 1, sequences: 64}}",
            ),
            "has 511 sizes before global_batch_size=512, and each is a program of its own; up to",
        ),
        (
            (
                *("--mesh.dc=6", "--dc.role=stage", "--model.max_position_embeddings=64"),
                "--batch={global_batch_size: 2048, sequence_length: 64, microbatches: 2048, "
                "ramp: {start: 8, increment: 8, sequences: 64}}",
            ),
            "sizes of batch.ramp have 261120 microbatches together, and schedules for 6 chunks",
        ),
        (("--mesh.tensor", "3"), "tensor can be"),
        (("--mesh.context", "3"), "sequence"),
        (("--zero.stage", "4"), "zero.stage"),
        (("--communication.bucket_layers", "5"), "6 layers; 1, 2, 3, 6 would"),
        (("--zero.reshard_after_forward", "false"), "reshard_after_forward=false requires stage=3"),
        (("--zero", "{stage: 0, across_sites: true}"), "across_sites requires stage=1, 2 or 3"),
        (
            ("--pipeline", "{schedule: zbv}"),
            "schedule zbv requires virtual_stages=2; got 1",
        ),
        (
            ("--pipeline.virtual_stages", "2"),
            "requires virtual_stages=1; got 2, which interleaved, zbv can have",
        ),
        (("--pipeline.schedule", "fastest"), "pipeline.schedule: no schedule is called 'fastest'"),
        (
            ("--pipeline", "{schedule: interleaved, virtual_stages: 2}"),
            "pipeline.virtual_stages requires two stages or more; got 1",
        ),
        (
            ("--mesh.dc", "2", "--dc.role", "stage", "--pipeline.layers", "[3, 2]"),
            "the model has 6 layers in mesh.dc=2 = 2 chunks; [3, 3] would work",
        ),
        (
            ("--mesh.dc", "8", "--dc.role", "stage"),
            "mesh.dc=8 = 8 chunks need a layer each, and the model has 6; 6 stages are the most",
        ),
        (
            (
                *("--mesh.dc=2", "--dc.role=stage"),
                "--pipeline={schedule: interleaved, virtual_stages: 4}",
            ),
            "the model has 6; virtual_stages can be up to 3",
        ),
        (
            ("--mesh.dc=2", "--dc.role=stage", "--zero.across_sites=true"),
            "zero.across_sites requires dc.role=data: ",
        ),
        (
            ("--mesh.dc=2", "--islands.on_loss=go_on"),
            "islands.on_loss=go_on requires dc.join=islands and islands.lease (the record by which",
        ),
        (
            (
                "--mesh.dc=2",
                "--dc.join=islands",
                "--dc.role=stage",
                "--islands.on_loss=go_on",
                "--islands.lease.path=record.json",
            ),
            "islands.on_loss=go_on requires dc.role=data; set that, or remove islands.on_loss",
        ),
        (
            ("--mesh.dc=2", "--dc.join=islands", "--islands.lease.path=record.json"),
            "islands.lease requires islands.on_loss=go_on; set it, or remove islands.lease",
        ),
        (
            ("--mesh.dc=2", "--dc.join=islands", "--islands.batch=shrink"),
            "islands.batch=shrink requires islands.on_loss=go_on; set it, or remove islands.batch",
        ),
        (
            ("--mesh.dc=2", "--dc.join=islands", "--zero.across_sites=true"),
            "dc.join=islands requires zero.across_sites=false (each site holds the whole state). ",
        ),
        (
            ("--mesh.dc=2", "--dc.join=islands", "--model.num_nextn_predict_layers=1"),
            "dc.join=islands requires model.num_nextn_predict_layers=0. ",
        ),
        (
            ("--mesh.context=2", "--model.num_nextn_predict_layers=1"),
            "later tokens lie on other ranks; num_nextn_predict_layers=0 or context=1 would work",
        ),
        (
            ("--mesh.dc=2", "--mesh.data=3", "--dc.role=stage"),
            "does not divide over data=3 x expert=1 x microbatches=1 = 3; 6 or 9 would",
        ),
        (
            ("--loss_scale.initial", "1024"),
            "loss_scale requires precision=fp16; got bf16",
        ),
        (("--fp8.backend", "xla"), "fp8 requires an fp8- precision; got bf16"),
        (
            ("--precision=fp8-current", "--fp8.num_bf16_layers_per_end=3"),
            "none of the model's 6 layers to FP8; it can be at most 2",
        ),
        (
            ("--precision=fp8-current", "--fp8.share_amax_across_dc=true"),
            "fp8.share_amax_across_dc requires precision=fp8-delayed; got fp8-current",
        ),
        (
            (
                "--precision=fp8-delayed",
                "--fp8.share_amax_across_dc=true",
                "--mesh.dc=2",
                "--dc.role=stage",
            ),
            "fp8.share_amax_across_dc requires dc.role=data: ",
        ),
        (("--precision=fp16", "--loss_scale.minimum", "3"), "loss_scale.minimum: 3 is not a power"),
        (("--batch.sequence_length", "4096"), "longer than the model's"),
        (("--steps.x", "1"), "'steps' is not a group of settings"),
        (("--sample.temperature", "-1"), "sample.temperature: input should be greater"),
        (("--optimizer.beta2", "1.5"), "optimizer.beta2: input should be less than 1"),
        (("--communication.bucket_bytes", "0"), "communication.bucket_bytes: input should be"),
        (
            ("--communication.overlap_grad_reduce", "maybe"),
            "not 'maybe' (str); also communication.overlap_grad_reduce: input should be 'auto'",
        ),
        (
            ("--model.lora.target_modules", "[q_prj]"),
            "not ['q_prj'] (list); also model.lora.target_modules.0: input should be 'q_proj', ",
        ),
        (("--seed", "{1: 2"), "is not a valid YAML value"),
        (("--seed", "true"), "seed: expected a number, not true"),
        (("--steps", "0b_"), "'0b_' is not a valid YAML value ('0b_' is no valid int)"),
        (
            ("--precision", "fp8"),
            "precision: no value is called 'fp8'; in geojax it is 'fp8-current'",
        ),
        (("--mesh.data", "1048576"), "makes 1,048,576 devices; up to 131,072 would do"),
        (
            (SOURCES, "--data.sources.1.weight", "1"),
            "'1' is no place in a list of 1, counted from 0",
        ),
        (
            (SOURCES, "--data.sources.0.wieght=1"),
            "sources.0.wieght: unknown key; did you mean 'weight'",
        ),
        (
            ("--mesh.dc=2", "--dc.role=stage", "--batch.microbatches=1048576"),
            "batch.microbatches=1048576 is more than a schedule for 2 chunks is made for; it can "
            "be up to 8192",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, overrides, message):
    with pytest.raises(UserError) as refused:
        load(tmp_path, MINIMAL, *overrides)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("--topology", ""), "--topology: its value is empty; null or '\"\"' would be one"),
        (("--steps=",), "--steps: its value is empty"),
        (("--steps", "!!map [1, 2]"), "expected a mapping of keys, but found none"),
    ],
)
def test_a_value_that_says_nothing_is_refused(tmp_path, overrides, message):
    with pytest.raises(UserError) as refused:
        load(tmp_path, MINIMAL, *overrides)
    assert message in str(refused.value)


def test_a_group_may_be_replaced_before_its_settings_are_changed(tmp_path):
    config = load(tmp_path, MINIMAL, "--model=tiny", "--model.num_hidden_layers=2")
    assert config.model.num_hidden_layers == 2
    assert load(tmp_path, MINIMAL, "--topology", "null").topology is None


def test_each_mistake_has_a_line(tmp_path):
    with pytest.raises(UserError) as refused:
        load(tmp_path, MINIMAL, "--steps=0", "--seed=-1")
    assert str(refused.value).splitlines() == [
        "--steps: input should be greater than 0, not 0 (int)",
        "--seed: input should be greater than or equal to 0, not -1 (int)",
    ]


def test_a_misspelt_required_key_is_called_unknown_not_missing(tmp_path):
    with pytest.raises(UserError, match="stepz: unknown key; did you mean 'steps'"):
        load(tmp_path, MINIMAL.replace("steps", "stepz"))


@pytest.mark.parametrize("role", ["data", "stage"])
def test_layers_are_given_for_every_chunk(tmp_path, role):
    stages = 4 if role == "stage" else 2
    mesh = ("--mesh", "{dc: 2, stage: 2}", "--dc.role", role)
    config = load(tmp_path, MINIMAL, *mesh)
    assert config.pipeline_stages == stages
    settings = PipelineSettings(layers=(2, *[1] * (stages - 1)))
    check_stages(settings, sites=config.pipeline_sites, stage=2, layers=stages + 1)
    with pytest.raises(UserError, match=f"= {stages} chunks; .* would work"):
        check_stages(settings, sites=config.pipeline_sites, stage=2, layers=stages)


@pytest.mark.parametrize(
    "url", ["gs://bucket/run", "s3://bucket/run", "s3:/bucket", "file:///runs/x", "hdfs://n:1/x"]
)
def test_a_url_as_run_directory_is_refused(tmp_path, url):
    with pytest.raises(UserError, match="is a URL; give the path of a file system") as refusal:
        load(tmp_path, MINIMAL, "--run_directory", url)
    assert "\n" not in str(refusal.value)


@given(
    share=st.integers(1, 6),
    microbatches=st.integers(2, 40),
    start=st.integers(1, 300),
    increment=st.integers(1, 300),
)
def test_a_ramp_that_is_refused_names_one_that_works(share, microbatches, start, increment):
    batch = {"global_batch_size": share * microbatches, "sequence_length": 8}
    batch["microbatches"] = microbatches

    def made(start, increment):
        ramp = {"start": start, "increment": increment, "sequences": 50}
        return BatchSettings.model_validate(batch | {"ramp": ramp})

    try:
        settings = made(start, increment)
    except ValueError as error:
        named = re.search(r"from (\d+) by (\d+) would", str(error))
        settings = made(*map(int, named.groups()))
    sizes = (*settings.sizes.smaller, settings.global_batch_size)
    assert len(sizes) > 1
    for size in sizes:
        assert size == share * settings.microbatches_of(size)


def test_trackers_are_files_unless_others_are_named(tmp_path):
    config = load(tmp_path)
    assert config.trackers == ("jsonl", "tensorboard")
    config = load(tmp_path, MINIMAL, "--trackers", "[wandb, {module: 'a.b:C', x: [1]}]")
    wandb, own = config.model_dump(mode="json")["trackers"]
    assert wandb["name"] == "wandb"
    assert own == {"module": "a.b:C", "x": [1]}
    assert hash(config) != hash(load(tmp_path))
    with pytest.raises(UserError, match="trackers: wandb is listed twice"):
        load(tmp_path, MINIMAL, "--trackers", "[wandb, jsonl, {name: wandb, mode: offline}]")


def test_a_missing_library_of_a_tracker_is_refused_before_the_processes_meet(tmp_path, monkeypatch):
    config = load(tmp_path, MINIMAL, "--trackers", "[wandb]")
    monkeypatch.setattr("geojax.trackers.tracker_settings._is_installed", lambda package: False)
    monkeypatch.setattr("geojax.train.start.runtime.start", lambda processes: pytest.fail("met"))
    with pytest.raises(UserError, match=r"pip install 'geojax-trainer\[wandb\]'"):
        start(config, ProcessSettings())
