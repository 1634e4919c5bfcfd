"""Settings of a whole run: one YAML file, checked before any device is touched."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pydantic

from geojax.config.adapt_settings import AdaptSettings
from geojax.config.foreign_names import FOREIGN_NAMES
from geojax.config.fp8_settings import Fp8Settings, check_fp8
from geojax.config.island_settings import LossSettings
from geojax.config.layout import Layout, check_layout
from geojax.config.metrics_settings import MetricsSettings
from geojax.config.profile_settings import ProfileSettings
from geojax.config.vocabulary import with_vocabulary
from geojax.config.written_config import WrittenConfig, written_config
from geojax.data import DataSettings
from geojax.models import ModelConfig, parameter_shapes
from geojax.models.frozen import mark_frozen, trained_part
from geojax.models.huggingface.checkpoint import read_model_fields
from geojax.models.own.settings import AnyModel, OwnModel, settings_class
from geojax.named_arrays import leaves_by_name
from geojax.optim import OptimizerSettings
from geojax.optim.optimizer import check_groups
from geojax.optim.registry import optimizer_entry
from geojax.paths import ResolvedPath, resolved_path
from geojax.precision import LossScaleSettings
from geojax.quantities import Count, SimulatedDevices, StepCount
from geojax.runtime import WatchdogSettings
from geojax.settings import Settings, validate
from geojax.suggestions import ForeignNames
from geojax.topology import Topology
from geojax.trackers.tracker_settings import AnyTracker, name_of


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


def _validated(model: Any) -> AnyModel:
    """Validate a model by the class of its settings."""
    is_model = isinstance(model, ModelConfig | OwnModel)
    return model if is_model else settings_class(model).model_validate(model)


class RunConfig(Layout):
    """A whole run, as `geojax train` reads it: its layout, and all that is the same in any."""

    lister: ClassVar[str | None] = "geojax train --help"
    foreign_names: ClassVar[ForeignNames | None] = FOREIGN_NAMES

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

    model: Annotated[pydantic.SerializeAsAny[AnyModel], pydantic.PlainValidator(_validated)]
    """Preset's name, mapping with `preset:` and changes, or whole description. `huggingface:` in
    place of `preset:` takes the sizes from the `config.json` in that folder. `module:` names a
    function of yours that returns a `geojax.models.Decoder`; the other keys are its arguments."""

    initial_weights: ResolvedPath | None = None
    """Folder of a Hugging Face checkpoint (config.json and safetensors), or of an exported model of
    your own, whose weights a new run starts from. null: random weights. Each process reads what its
    devices hold. With `model.lora` these weights are frozen and in no checkpoint: every resume,
    export and evaluation reads them again."""

    data: DataSettings
    """Sources of text, tokenizer and validation sets."""

    fp8: Fp8Settings = Fp8Settings()
    """Settings of an "fp8-" precision."""

    loss_scale: LossScaleSettings = LossScaleSettings()
    """Dynamic loss scale of fp16; other precisions have none."""

    optimizer: OptimizerSettings = OptimizerSettings()
    """Optimizer and its schedule."""

    evaluation: EvaluationSettings = EvaluationSettings()
    """Validation while training."""

    checkpoint: CheckpointSettings = CheckpointSettings()
    """Intervals of checkpoints."""

    preflight: Literal["refuse", "warn"] = "refuse"
    """Refuse a run before compilation if its estimated memory (see `geojax plan`) exceeds its
    devices' memory, or only warn."""

    trackers: tuple[AnyTracker, ...] = pydantic.Field(
        default=("jsonl", "tensorboard"), max_length=16
    )
    """Receivers of the metrics: jsonl, tensorboard, wandb, mlflow, otlp, a mapping with `name` and
    settings, or `module:Class` of yours. Default: [jsonl, tensorboard]. `metrics.jsonl` is always
    written: the loss curve and a resumed run need it."""

    metrics: MetricsSettings = MetricsSettings()
    """Processes that write their metrics."""

    adapt: AdaptSettings = AdaptSettings()
    """Comparison of measured steps with the plan, and the reaction to a difference."""

    islands: LossSettings = LossSettings()
    """Behavior of islands when a site is lost."""

    watchdog: WatchdogSettings = WatchdogSettings()
    """Time limits of a step."""

    profile: ProfileSettings = ProfileSettings()
    """Profiles of some steps."""

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

    @pydantic.field_validator("trackers")
    @classmethod
    def _trackers_differ(cls, trackers: tuple[Any, ...]) -> tuple[Any, ...]:
        names = [name_of(tracker) for tracker in trackers]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name} is listed twice; once would do")
        return trackers

    @property
    def layout(self) -> Layout:
        """The layout alone."""
        return Layout.model_construct(**{name: getattr(self, name) for name in Layout.model_fields})

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

    @pydantic.model_validator(mode="after")
    def _model_takes_the_layout(self) -> "RunConfig":
        check_layout(self, self.model)
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
    def _loss_of_a_site_can_be(self) -> "RunConfig":
        if self.islands.on_loss == "restart":
            if self.islands.lease is not None:
                raise ValueError(
                    "islands.lease requires islands.on_loss=go_on; set it, or remove islands.lease"
                )
            if self.islands.batch == "shrink":
                raise ValueError(
                    "islands.batch=shrink requires islands.on_loss=go_on; set it, or remove "
                    "islands.batch"
                )
            return self
        required = {
            "dc.join=islands": self.dc.join == "islands",
            "dc.role=data": self.dc.role == "data",
            "islands.lease (the record by which the sites decide)": self.islands.lease is not None,
            "adapt.replan=false": not self.adapt.replan,
        }
        missing = [name for name, holds in required.items() if not holds]
        if missing:
            raise ValueError(
                f"islands.on_loss=go_on requires {' and '.join(missing)}; set that, or remove "
                "islands.on_loss"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _profile_can_be(self) -> "RunConfig":
        profiled = self.profile.first_and_last
        if profiled is not None and profiled[1] > self.steps:
            raise ValueError(
                f"profile: step {profiled[1]} is beyond the last of {self.steps} steps; choose "
                "other steps, or raise steps"
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
    def _own_model_can_be(self) -> "RunConfig":
        if not isinstance(self.model, OwnModel):
            return self
        if self.precision.startswith("fp8-") and (kind := self.model.block_without_fp8):
            raise ValueError(
                f"precision={self.precision} requires blocks with linear layers of geojax; "
                f"{kind} has none. Set another precision, or build it of geojax.models.layers"
            )
        return self

    @property
    def _has_adapters(self) -> bool:
        trained = trained_part(mark_frozen(self.model, parameter_shapes(self.model)))
        return bool(leaves_by_name(trained))

    @pydantic.model_validator(mode="after")
    def _adapters_can_be(self) -> "RunConfig":
        if self.model.lora is None:
            return self
        required = {
            "initial_weights (the weights to adapt)": self.initial_weights is not None,
            "linear layers of geojax with adapters": self._has_adapters,
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

    @classmethod
    def load(cls, path: Path, overrides: Sequence[str] = ()) -> "RunConfig":
        """Read a config file on top of its bases, and apply `--dotted.name value` overrides.

        Raises:
            UserError: a line for each mistake, with its place, the path of the field that is wrong
                and what would be right.
        """
        return cls.of_written(written_config(path, overrides))

    @classmethod
    def of_written(cls, written: WrittenConfig) -> "RunConfig":
        """Validate what was read.

        Raises:
            UserError: a line for each mistake, with its place.
        """
        return validate(cls, written.content, written.origins)
