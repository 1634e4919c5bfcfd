"""Settings of a whole run: one YAML file, checked before any device is touched."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pydantic

from geojax.collectives import WireName
from geojax.config.adapt_settings import AdaptSettings
from geojax.config.fp8_settings import Fp8Settings, check_fp8
from geojax.config.pipeline_settings import (
    DcSettings,
    PipelineSettings,
    check_scheduled,
    check_stages,
)
from geojax.config.vocabulary import with_vocabulary
from geojax.data import DataSettings
from geojax.errors import UserError
from geojax.models import ModelConfig, parameter_shapes
from geojax.models.frozen import mark_frozen, trained_part
from geojax.models.huggingface import read_model_fields
from geojax.models.parallel.limits import check_parallelism
from geojax.models.parallel.parallelism import ContextMethod, Parallelism
from geojax.optim import OptimizerSettings
from geojax.optim.parameter_groups import check_groups
from geojax.optim.registry import optimizer_entry
from geojax.paths import ResolvedPath, resolved_path
from geojax.precision import LossScaleSettings, PrecisionName
from geojax.quantities import Bytes, Count, Length, SimulatedDevices, StepCount
from geojax.renamed_keys import RUN_KEYS, RUN_VALUES
from geojax.runtime import WatchdogSettings
from geojax.settings import AUTO, NUMBER, UNLESS_AUTO, Settings, load_yaml, validate
from geojax.suggestions import listed, shortened
from geojax.topology import Topology
from geojax.yaml_syntax import YamlError, parse

_MOST_DEVICES = 2**17


class MeshSettings(Settings):
    """Sizes of the mesh axes; their product is the number of devices."""

    dc: Count = 1
    """Sites. With `dc.role: data` each site trains on its own share of the batch, and gradients are
    summed across the link."""

    stage: Count = 1
    """Pipeline stages inside a site."""

    data: Count = 1
    """Data-parallel ranks inside a site; the training state is sharded over them."""

    expert: Count = 1
    """Ranks inside a site that share the experts (expert parallelism). For all other weights, and
    for a dense model, they are data-parallel ranks."""

    context: Count = 1
    """Ranks that share one sequence (context parallelism)."""

    tensor: Count = 1
    """Ranks that share one layer (tensor parallelism)."""

    @property
    def devices(self) -> int:
        """Number of devices that the mesh needs."""
        return math.prod(self.model_dump().values())

    @pydantic.model_validator(mode="after")
    def _devices_can_be_listed(self) -> "MeshSettings":
        if self.devices > _MOST_DEVICES:
            product = " x ".join(f"{axis}={size}" for axis, size in self if size > 1)
            raise ValueError(
                f"{product} makes {self.devices:,} devices; up to {_MOST_DEVICES:,} would do"
            )
        return self


class ParallelismSettings(Settings):
    """Sequence and context parallelism of the ranks of `tensor` and `context`."""

    sequence: bool = False
    """Sequence parallelism: the ranks of `tensor` shard the sequence between the matmuls. They send
    the same bytes and hold 1/tensor of those activations."""

    context_method: ContextMethod = "ring"
    """Context parallelism of attention: "ring", "all_gather" or "ulysses"."""


class ZeroSettings(Settings):
    """ZeRO (FSDP): state that is sharded over the data-parallel ranks inside a site."""

    stage: Literal[0, 1, 2, 3] = 1
    """Sharded state. 0: none. 1: master weights and optimizer state. 2: gradients too, reduced
    layer by layer. 3: the weights in the compute dtype too, gathered layer by layer."""

    across_sites: bool = False
    """Shard master weights and optimizer state over the sites as well, which saves memory. After
    the update, weights in the compute dtype cross the link instead of summed gradients."""

    reshard_after_forward: bool = True
    """Stage 3: free the gathered weights after the forward pass, and gather them again for the
    backward pass. false: keep them; with `dc.join: islands` for all microbatches of a step."""

    @pydantic.model_validator(mode="after")
    def _stage_allows_the_rest(self) -> "ZeroSettings":
        if self.across_sites and self.stage == 0:
            raise ValueError(
                "across_sites requires stage=1, 2 or 3; got 0. Remove across_sites, or set stage"
            )
        if not self.reshard_after_forward and self.stage != 3:
            raise ValueError(
                f"reshard_after_forward=false requires stage=3; got {self.stage}. Remove "
                "reshard_after_forward, or set stage"
            )
        return self


class BatchSettings(Settings):
    """The global batch of one step; the same on every mesh."""

    global_batch_size: Count
    """Sequences in one step, over all sites."""

    sequence_length: Length
    """Tokens in a sequence."""

    microbatches: Count = 1
    """Microbatches of each data-parallel rank, or pipeline, before gradients are reduced (gradient
    accumulation). A pipeline allows at most 8,192, and 131,072 divided by its chunks."""


class CommunicationSettings(Settings):
    """Reduction of the gradients: buckets, compression and overlap."""

    bucket_bytes: Annotated[Annotated[Bytes | None, NUMBER] | AUTO, UNLESS_AUTO] = "auto"
    """Most bytes of a bucket: gradients that are reduced as one message. While one bucket crosses
    the link, the next is reduced inside the site. "auto": at least ten bandwidth-delay products of
    a device's share of the topology's link, within a tenth of its memory. Without a topology:
    16777216. null: a bucket per leaf."""

    gradient_compression: WireName = "none"
    """Format of gradients on the link. "none": the dtype of the reduction, at least fp32. "bf16":
    half the bytes. "int8": blocks with a scale each, a little more than a quarter of the bytes.
    int8 has error feedback, which adds the rounding error to the next step's gradient. Sites stay
    bit-identical."""

    overlap_grad_reduce: bool | Literal["auto"] = "auto"
    """Reduce the gradients of a bucket of layers during the backward pass of the layers before.
    Each bucket is then one message, whatever `bucket_bytes`. With pipeline stages inside the sites,
    a bucket is the head or a chunk, and leaves after its last backward; more `virtual_stages` hide
    more. false: reduce all gradients after the backward pass. "auto": true where the topology
    predicts less exposed time on the link; false without a topology."""

    bucket_layers: Annotated[Annotated[Count, NUMBER] | AUTO, UNLESS_AUTO] = "auto"
    """With `overlap_grad_reduce`: layers of a bucket. Their backward pass should last longer than a
    message takes between sites. "auto": as many layers as this time and a tenth of the memory
    allow, by the topology; 1 without one."""


class EvaluationSettings(Settings):
    """Validation while training."""

    interval: StepCount = 200
    """Steps between two validations. The first validation is before the first step, and the last
    after the last step."""

    sequences: Count = 256
    """Most sequences read from each validation set, the same ones every time."""


class CheckpointSettings(Settings):
    """Checkpoints; there is always one at the end and on Ctrl-C."""

    interval: StepCount = 500
    """Steps between two checkpoints."""

    interval_minutes: float = pydantic.Field(default=15.0, ge=1e-6, le=1e6)
    """Most minutes between two checkpoints."""

    keep: Count = 3
    """Number of the newest checkpoints that stay on disk."""

    per_site: bool = True
    """With several sites, each saves and reads its own part in checkpoints/<site>. Sites then need
    no common file system, and no checkpoint crosses the link. false: all sites write one checkpoint
    together, on a file system that they share."""


class SampleSettings(Settings):
    """Text that the trained model writes at the end of a run."""

    prompts: tuple[str, ...] = pydantic.Field(default=(), max_length=256)
    """Prompts of the samples. Without prompts no sample is written."""

    max_new_tokens: int = pydantic.Field(default=200, ge=1, le=2**16)
    """Tokens per sample."""

    temperature: float = pydantic.Field(default=0.7, ge=0, le=1e3)
    """Divisor of the logits; 0 picks the likeliest token."""


class RunConfig(Settings):
    """A whole run, as `geojax train` reads it."""

    lister: ClassVar[str | None] = "geojax settings"
    renamed_keys: ClassVar[Mapping[str, str]] = RUN_KEYS
    renamed_values: ClassVar[Mapping[tuple[str, str], str]] = RUN_VALUES

    run_directory: ResolvedPath
    """Directory of checkpoints, metrics, plots and the resolved config."""

    seed: int = pydantic.Field(default=0, ge=0, lt=2**32)
    """Seed of initialization, data order and dropout, the same on every layout."""

    steps: StepCount
    """Optimizer steps in the whole run."""

    topology: str | None = None
    """Preset or YAML file that describes the sites. null: the processes describe them."""

    simulate_devices: SimulatedDevices | None = None
    """Simulate this many CPU devices in each process instead of using real accelerators."""

    mesh: MeshSettings = MeshSettings()
    """Sizes of the mesh axes."""

    model: ModelConfig
    """Preset's name, mapping with `preset:` and changes, or whole description. `huggingface:` in
    place of `preset:` takes the sizes from the `config.json` in that folder."""

    initial_weights: ResolvedPath | None = None
    """Folder of a Hugging Face checkpoint (config.json and safetensors) whose weights a new run
    starts from. null: random weights. Each process reads what its devices hold. With `model.lora`
    these weights are frozen and in no checkpoint: every resume, export and evaluation reads them
    again."""

    parallelism: ParallelismSettings = ParallelismSettings()
    """Sequence and context parallelism."""

    dc: DcSettings = DcSettings()
    """Role of the sites."""

    pipeline: PipelineSettings = PipelineSettings()
    """Schedule and chunks of pipeline stages."""

    zero: ZeroSettings = ZeroSettings()
    """State sharded over data-parallel ranks."""

    data: DataSettings
    """Sources of text, tokenizer and validation sets."""

    batch: BatchSettings
    """The global batch."""

    precision: PrecisionName = "bf16"
    """Dtype in which weights are gathered and multiplied. Master weights are at least fp32. The
    "fp8-" recipes use FP8 for the matmuls of linear layers and bf16 elsewhere."""

    fp8: Fp8Settings = Fp8Settings()
    """Settings of an "fp8-" precision."""

    loss_scale: LossScaleSettings = LossScaleSettings()
    """Dynamic loss scale of fp16; other precisions have none."""

    remat: Literal["none", "selective", "full"] = "none"
    """Rematerialization: activations that the backward pass computes again. none: no activations.
    selective: all but the results of matmuls. full: all inside a layer."""

    optimizer: OptimizerSettings = OptimizerSettings()
    """Optimizer and its schedule."""

    communication: CommunicationSettings = CommunicationSettings()
    """Buckets and compression of the gradients."""

    evaluation: EvaluationSettings = EvaluationSettings()
    """Validation while training."""

    checkpoint: CheckpointSettings = CheckpointSettings()
    """Intervals of checkpoints."""

    preflight: Literal["refuse", "warn"] = "refuse"
    """Refuse a run before compilation if its estimated memory (see `geojax memory`) exceeds its
    devices' memory, or only warn."""

    adapt: AdaptSettings = AdaptSettings()
    """Comparison of measured steps with the plan, and the reaction to a difference."""

    watchdog: WatchdogSettings = WatchdogSettings()
    """Time limits of a step."""

    sample: SampleSettings = SampleSettings()
    """Text at the end of the run."""

    skip_limit: Count = 10
    """Consecutive steps with a non-finite loss or gradient after which the run stops. In fp16 the
    count starts once the loss scale is at its minimum."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _vocabulary_follows_from_data(cls, content: Any) -> Any:
        if not isinstance(content, Mapping) or "model" not in content:
            return content
        return {**content, "model": with_vocabulary(content["model"], content.get("data"))}

    @pydantic.field_validator("model", mode="before")
    @classmethod
    def _resolve_preset(cls, value: Any) -> Any:
        if isinstance(value, str):
            return ModelConfig.load(value)
        if not isinstance(value, dict):
            return value
        if "preset" in value and "huggingface" in value:
            raise ValueError("preset and huggingface both describe the model; give one of them")
        changes = {key: each for key, each in value.items() if key not in ("preset", "huggingface")}
        if "preset" in value:
            return ModelConfig.load(value["preset"]).model_dump(exclude_unset=True) | changes
        if "huggingface" in value:
            if not isinstance(value["huggingface"], str):
                raise ValueError("huggingface must be the path of a folder with a config.json")
            return read_model_fields(resolved_path(value["huggingface"])) | changes
        return value

    @property
    def model_parallelism(self) -> Parallelism:
        """Sharding of model and sequences on the mesh."""
        return Parallelism(
            tensor=self.mesh.tensor,
            sequence=self.parallelism.sequence and self.mesh.tensor > 1,
            context=self.mesh.context,
            context_method=self.parallelism.context_method,
            expert=self.mesh.expert,
        )

    def load_topology(self) -> Topology | None:
        """Read the topology, with `adapt.links` in place of its own; None: there is none.

        Raises:
            UserError: there is no such topology, or it has a mistake.
        """
        if self.topology is None:
            return None
        topology = Topology.load(self.topology)
        own = {frozenset(link.sites): link for link in self.adapt.links}
        for link in self.adapt.links:
            for site in link.sites:
                topology.site(site)  # refuses a name that it does not know
        links = [link for link in topology.links if frozenset(link.sites) not in own]
        return topology.model_copy(update={"links": (*links, *self.adapt.links)})

    @property
    def pipeline_sites(self) -> int:
        """The number of sites that one pipeline runs through."""
        return self.mesh.dc if self.dc.role == "stage" else 1

    @property
    def pipeline_stages(self) -> int:
        """The number of stages of one pipeline; 1 where there is none."""
        return self.pipeline_sites * self.mesh.stage

    @pydantic.model_validator(mode="after")
    def _model_can_be_sharded(self) -> "RunConfig":
        check_parallelism(self.model, self.model_parallelism, self.batch.sequence_length)
        return self

    @pydantic.model_validator(mode="after")
    def _timeline_can_be(self) -> "RunConfig":
        if self.dc.timeline_step is None:
            return self
        if self.dc.join != "islands":
            raise ValueError(
                "dc.timeline_step requires dc.join=islands; change that, or remove dc.timeline_step"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _loss_scale_is_used(self) -> "RunConfig":
        if self.precision != "fp16" and self.loss_scale != LossScaleSettings():
            raise ValueError(
                f"loss_scale requires precision=fp16; got {self.precision}. Remove loss_scale, or "
                "set precision"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _fp8_is_used(self) -> "RunConfig":
        stages = self.dc.role == "stage"
        check_fp8(
            self.fp8, self.precision, layers=self.model.num_stacked_layers, sites_are_stages=stages
        )
        return self

    @pydantic.model_validator(mode="after")
    def _groups_have_parameters(self) -> "RunConfig":
        if self.optimizer.groups:
            shapes = mark_frozen(self.model, parameter_shapes(self.model))
            check_groups(self.optimizer.groups, trained_part(shapes))
        return self

    @pydantic.model_validator(mode="after")
    def _adapters_can_be(self) -> "RunConfig":
        if self.model.lora is None:
            return self
        required = {
            "initial_weights (the weights to adapt)": self.initial_weights is not None,
            "a precision without FP8": not self.precision.startswith("fp8-"),
            "dc.join=one_program": self.dc.join == "one_program",
            "adapt.replan=false": not self.adapt.replan,
        }
        missing = [name for name, holds in required.items() if not holds]
        if missing:
            raise ValueError(f"model.lora requires {' and '.join(missing)}; set it, or remove lora")
        return self

    @pydantic.model_validator(mode="after")
    def _statistics_stay_in_a_site(self) -> "RunConfig":
        if not self.zero.across_sites:
            return self
        for name in sorted(self.optimizer.optimizers):
            if (needed := optimizer_entry(name).statistics) != "none":
                raise ValueError(
                    f"optimizer {name} requires zero.across_sites=false: it needs the {needed} of "
                    "whole weights, and their shards at several sites would cross the link for "
                    "them. Remove zero.across_sites"
                )
        return self

    @pydantic.model_validator(mode="after")
    def _layers_divide(self) -> "RunConfig":
        layers, together = self.model.num_stacked_layers, self.communication.bucket_layers
        if together != "auto" and layers % together:
            fitting = listed(n for n in range(1, layers + 1) if layers % n == 0)
            raise ValueError(
                f"communication.bucket_layers={together} does not divide the model's {layers} "
                f"layers; {fitting} would"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _stages_fit(self) -> "RunConfig":
        sites, stage = self.pipeline_sites, self.mesh.stage
        layers = self.model.num_stacked_layers
        check_stages(self.pipeline, sites=sites, stage=stage, layers=layers)
        if self.dc.role == "stage" and self.zero.across_sites:
            raise ValueError(
                "zero.across_sites requires dc.role=data: with dc.role=stage the sites hold "
                "different layers. Remove zero.across_sites"
            )
        if self.pipeline_stages == 1:
            return self
        check_scheduled(
            self.pipeline_stages * self.pipeline.virtual_stages, self.batch.microbatches
        )
        if self.zero.stage > 1:
            raise ValueError(
                f"zero.stage={self.zero.stage} requires one pipeline stage: with more it would "
                "send the gradients (and weights) of a microbatch in every tick. Set zero.stage to "
                "0 or 1"
            )
        if self.communication.overlap_grad_reduce is True and self.dc.role == "stage":
            raise ValueError(
                "communication.overlap_grad_reduce requires dc.role=data where there are pipeline "
                "stages: with dc.role=stage the sites sum no gradients. Remove overlap_grad_reduce"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _islands_can_be(self) -> "RunConfig":
        if self.dc.join != "islands":
            return self
        required = {
            "mesh.dc of 2 or more": self.mesh.dc > 1,
            "mesh.stage=1 or dc.role=stage": self.mesh.stage == 1 or self.dc.role == "stage",
            "zero.across_sites=false (each site holds the whole state)": (
                not self.zero.across_sites
            ),
            "checkpoint.per_site=true": self.checkpoint.per_site,
            "model.num_nextn_predict_layers=0": self.model.num_nextn_predict_layers == 0,
        }
        missing = [name for name, holds in required.items() if not holds]
        if missing:
            raise ValueError(
                f"dc.join=islands requires {' and '.join(missing)}. Change that, or set dc.join to "
                "one_program"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _compression_has_sums(self) -> "RunConfig":
        compression = self.communication.gradient_compression
        if compression == "none":
            return self
        if self.dc.role == "stage":
            raise ValueError(
                f"communication.gradient_compression={compression} requires dc.role=data: with "
                "dc.role=stage the sites send activations and sum no gradients. Remove "
                "communication.gradient_compression"
            )
        if compression == "int8" and self.model.use_router_bias:
            raise ValueError(
                "communication.gradient_compression=int8 requires model.use_router_bias=false: "
                "counts of experts' tokens would share the scales of gradients. Set it to bf16"
            )
        if self.zero.across_sites:
            raise ValueError(
                f"communication.gradient_compression={compression} requires "
                "zero.across_sites=false: it gives all sites the same sums, and zero.across_sites "
                "sums each part for one site. Remove one of them"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _batch_divides(self) -> "RunConfig":
        axes = ("dc", "data", "expert") if self.dc.role == "data" else ("data", "expert")
        sizes = {axis: getattr(self.mesh, axis) for axis in axes}
        sizes["microbatches"] = self.batch.microbatches
        shares = math.prod(sizes.values())
        batch = self.batch.global_batch_size
        if batch % shares:
            below = batch // shares * shares
            fitting = f"{below} or {below + shares}" if below else str(shares)
            product = " x ".join(f"{name}={size}" for name, size in sizes.items())
            raise ValueError(
                f"batch.global_batch_size={batch} does not divide over {product} = {shares}; "
                f"{fitting} would"
            )
        if self.batch.sequence_length > self.model.max_position_embeddings:
            raise ValueError(
                f"batch.sequence_length={self.batch.sequence_length} is longer than the model's "
                f"max_position_embeddings={self.model.max_position_embeddings}"
            )
        return self

    @classmethod
    def load(cls, path: Path, overrides: Sequence[str] = ()) -> "RunConfig":
        """Read a config file and apply `--dotted.name value` overrides.

        Raises:
            UserError: one line, with the path of the field that is wrong and what would be right.
        """
        content = load_yaml(path)
        for name, value in _parse_overrides(overrides):
            _override(content, name, value)
        return validate(cls, content, str(path))


def _parse_overrides(arguments: Sequence[str]) -> list[tuple[str, Any]]:
    """`--a.b 1 --c=x` as [("a.b", 1), ("c", "x")]; values are read as YAML."""
    pairs, remaining = [], list(arguments)
    while remaining:
        name, equals, value = remaining.pop(0).partition("=")
        if not name.startswith("--") or not name[2:]:
            raise UserError(f"'{name}': expected an override such as --optimizer.warmup_steps 50")
        if not equals:
            if not remaining:
                raise UserError(f"{name}: a value is missing")
            value = remaining.pop(0)
        try:
            parsed = parse(value)
        except YamlError as error:
            raise UserError(
                f"{name}: '{shortened(value)}' is not a valid YAML value ({error})"
            ) from None
        if parsed is None and value.strip().lower() not in ("null", "~"):
            raise UserError(f"{name}: its value is empty; null or '\"\"' would be one")
        pairs.append((name[2:].replace("-", "_"), parsed))
    return pairs


def _override(content: dict[str, Any], name: str, value: Any) -> None:
    """Put `value` in the place of `content` that is called `name`: data.sources.0.prepared, say."""
    *parents, last = name.split(".")
    group: Any = content
    for depth, parent in enumerate(parents):
        place = _place(group, parent, name)
        inner = group.setdefault(place, {}) if isinstance(group, dict) else group[place]
        if parent == "model" and isinstance(inner, str):
            inner = group[place] = {"preset": inner}
        if not isinstance(inner, dict | list):
            path = ".".join(parents[: depth + 1])
            raise UserError(f"--{name}: '{path}' is not a group of settings in the config file")
        group = inner
    group[_place(group, last, name)] = value


def _place(group: dict[str, Any] | list[Any], part: str, name: str) -> Any:
    """Return the key or the index of `part`, a part of the override `name`, in a group."""
    if isinstance(group, dict):
        return part
    if not (part.isascii() and part.isdecimal() and len(part) < 9 and int(part) < len(group)):
        raise UserError(
            f"--{name}: '{part}' is no place in a list of {len(group)}, counted from 0; give the "
            "whole list as YAML to change it"
        )
    return int(part)
