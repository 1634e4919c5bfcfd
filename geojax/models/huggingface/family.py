"""A family of Hugging Face models: its `config.json` and its tensors, each as one table.

Reading and writing go by the same table, so that what was read is written as it was.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from geojax.errors import UserError
from geojax.json_file import shown
from geojax.models.config import ModelConfig
from geojax.models.huggingface.neutral_keys import NEUTRAL_KEYS, refuse_wrong_values
from geojax.models.huggingface.rope import ROPE_KEYS, read_rope, write_rope
from geojax.models.parameters import parameter_shapes
from geojax.named_arrays import leaves_by_name

TRAINING_FIELDS = frozenset(
    {"dropout", "initializer_range", "router_aux_loss_coef", "z_loss_coef"}
    | {"router_z_loss_coef", "mtp_loss_scaling_factor"}
)
"""Fields of a `ModelConfig` that leave the logits as they are: what they do ends with training."""


TABLE, HEAD = "embedding.tokens.embedding", "head.kernel"
"""Leaves of the table of tokens and of the output head, which may be tied to it."""


class _Required:
    """Marks a key without which a `config.json` is refused."""


REQUIRED = _Required()


class ConfigKey(NamedTuple):
    """A key of `config.json` and the fields of `ModelConfig` that have its value."""

    name: str
    fields: tuple[str, ...]
    default: Any = REQUIRED
    """Value where the key is absent, that of transformers; a function of the whole file computes it
    where it is null too. None stands for the fields' own default."""
    alias: str | None = None
    """Another name that transformers writes."""
    write: Callable[[ModelConfig], Any] | None = None
    """Function from the model to the key's value; None: it is the first field's."""
    is_written: bool = True
    """False for a key that transformers does not read."""
    takes_null: bool = True
    """False where transformers fails on null, though a field can be null."""
    can_express: Callable[[ModelConfig], bool] | None = None
    """Function that tells the models that the key can express; None: it can express all."""

    def read(self, content: Mapping[str, Any], source: str) -> Any:
        """Return the fields' value in the `config.json` called `source`; None: their default.

        Raises:
            UserError: the key is required and missing, or null where there must be a value.
        """
        name = self.name if self.alias is None or self.name in content else self.alias
        value = content.get(name, None if callable(self.default) else self.default)
        if value is REQUIRED or (value is None and self.default is REQUIRED):
            raise UserError(f"{source}: {self.name} is required and missing")
        if value is None and name in content and self._needs_value():
            raise UserError(f"{source}: {self.name} is null; remove it, or give its value")
        return self.default(content) if value is None and callable(self.default) else value

    def _needs_value(self) -> bool:
        """Return True where null says neither "none" nor "as another key says"."""
        infos = [info for name, info in ModelConfig.model_fields.items() if name in self.fields]
        chosen = any(info.default_factory is None and info.default for info in infos)
        has_default = self.default is not None and not callable(self.default)
        return not self.takes_null or (chosen and has_default)


class TensorRule(NamedTuple):
    """Tensors of a checkpoint and the leaves of geojax's parameter tree that hold them."""

    name: str
    """Name with `{layer}` where each layer has a tensor, and `{expert}` where each expert has."""
    leaves: tuple[str, ...]
    """Names of the leaves, which lie side by side along the tensor's last dim (before it is
    transposed); all but fused projections are one."""
    transposed: bool = False
    """True where the tensor is [outputs, inputs], and the leaf [inputs, outputs]."""
    interleaved: bool = False
    """True where several leaves take turns along that dim."""
    stacks_experts: bool = False
    """True where one tensor holds all experts of a layer, along its first dim."""
    wide: bool = False
    """True where at least float32 is written, whatever the dtype of the others."""
    only_for: Callable[[ModelConfig], bool] | None = None
    """Function that tells the models that have the tensor; None: all that have the leaves do."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture of transformers."""

    model_type: str
    """Value of `model_type` in `config.json`."""
    architecture: str
    """Class of transformers that the checkpoint is of."""
    keys: tuple[ConfigKey, ...]
    """Keys of `config.json` that describe the model."""
    implied: Mapping[str, Any]
    """Fields of `ModelConfig` that have one value in this family."""
    fixed: Mapping[str, Any]
    """Keys of `config.json` of which one value is carried, which is written."""
    tensors: tuple[TensorRule, ...]
    """The name map."""
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Tensors that hold another one once more, by name with `{layer}`, for each module that
    predicts later tokens (`num_nextn_predict_layers`): they are written, and left unread."""
    unwritten: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keys of which one value is carried, and which transformers does not read; see `fixed`."""
    rates: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Keys of rates that end with training, such as the dropout of attention weights: any is read
    and left, and the one here, which is geojax's, is written."""
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Neutral keys that are written so: transformers has defaults of them that do not suit every
    model."""
    ignored_keys: frozenset[str] = frozenset()
    """Further keys of `config.json` that leave the logits as they are."""
    nested_in: str | None = None
    """Key of `config.json` that holds `keys`, beside those of parts that geojax leaves out."""
    base_prefix: str = "model."
    """Beginning of the names of all tensors but the head; files of a model without a head leave it
    out."""
    ignored_tensors: str | None = None
    """Pattern of tensors that are no parameters: buffers that old checkpoints hold."""
    settings: type[ModelConfig] = ModelConfig
    """Class of its models' settings; one of its own has a field `model_type`."""
    has_rope: bool = True
    """True if positions are rotary."""
    rope_theta: float = 10_000.0
    """Base of rotary positions of a `config.json` that does not tell it."""
    partial_rotary_factor: float | None = None
    """Share of a head that is rotated, likewise; None: the family rotates all of a head, and
    transformers does not read the key."""
    rope_scaling: Mapping[str, Any] | None = None
    """Scaling of rotary positions, likewise; None: none."""
    carried_scaling: Callable[[Mapping[str, Any], str], Mapping[str, Any]] | None = None
    """Function from a `config.json` and its name to one whose scaling of rotary positions is
    carried, where the family has scalings of its own; None: it has none."""
    quantization: str | None = None
    """Method of quantized weights that are read; None: they must not be quantized."""

    def read_config(self, content: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Translate a `config.json` to the fields of a `ModelConfig`.

        Args:
            content: the file's.
            source: its name for messages.

        Raises:
            UserError: a key is missing or unknown, or has a value that geojax does not carry.
        """
        self.is_quantized(content, source)
        if self.nested_in is not None:
            if not isinstance(nested := content.get(self.nested_in), Mapping):
                raise UserError(f"{source}: {self.nested_in} is required and must be a mapping")
            content, source = nested, f"{source}: {self.nested_in}"
        self._refuse_others(content, source)
        if self.carried_scaling is not None:
            content = self.carried_scaling(content, source)
        fields = dict(self.implied)
        if self.settings is not ModelConfig:
            fields["model_type"] = self.model_type
        for key in self.keys:
            value = key.read(content, source)
            for field in key.fields:
                if field in fields and fields[field] != value:
                    others = " and ".join(each.name for each in self.keys if field in each.fields)
                    raise UserError(f"{source}: {others} must be equal; geojax has one {field}")
                if value is not None:
                    fields[field] = value
        if self.has_rope:
            fields["rope_parameters"] = read_rope(
                content,
                self.rope_theta,
                self.partial_rotary_factor,
                source,
                positions=fields["max_position_embeddings"],
                scaling=self.rope_scaling,
                by_layer_type="rope_local_base_freq" in fields,
            )
        if not _has_windows(fields):  # what they would be is told, and has no use
            for field in ("sliding_window", "rope_local_base_freq"):
                fields.pop(field, None)
        return fields

    def write_config(self, model: ModelConfig) -> dict[str, Any]:
        """Translate `model`, which has no `unsupported_reason`, to the keys of `config.json`."""
        content: dict[str, Any] = {"architectures": [self.architecture]}
        content["model_type"] = self.model_type
        for key in self.keys:
            if key.is_written:
                value = getattr(model, key.fields[0]) if key.write is None else key.write(model)
                content[key.name] = value
        content |= {**self.fixed, **self.rates, **self.written}
        if self.has_rope:
            content |= write_rope(
                model.rope_parameters,
                scaled=self.rope_scaling is not None,
                has_share=self.partial_rotary_factor is not None,
            )
        return content

    def unsupported_reason(self, model: ModelConfig) -> str | None:
        """Say which setting of `model` the family's `config.json` cannot express; None: none."""
        return next(iter(self.unsupported_reasons(model)), None)

    def unsupported_reasons(self, model: ModelConfig) -> list[str]:
        """List the settings of `model` that the family's `config.json` cannot express."""
        reasons = []
        for key in self.keys:
            values = [getattr(model, field, None) for field in key.fields]
            lacks_value = values[0] is None and not key.takes_null and key.write is None
            is_foreign = key.can_express is not None and not key.can_express(model)
            if lacks_value or is_foreign or any(value != values[0] for value in values):
                pairs = zip(key.fields, values, strict=True)
                reasons.append(" and ".join(f"{field}={value}" for field, value in pairs))
        covered = {field for key in self.keys for field in key.fields} | TRAINING_FIELDS
        if self.has_rope:
            covered.add("rope_parameters")
            share = model.rope_parameters.partial_rotary_factor
            if self.partial_rotary_factor is None and share != 1:
                reasons.append(f"rope_parameters.partial_rotary_factor={share:g}")
        if not model.is_moe:
            covered |= {"moe_intermediate_size", "norm_topk_prob"}
        if type(model) is not self.settings:
            reasons.append(f"model_type={getattr(model, 'model_type', None)}")
        covered.add("model_type")
        given = model.model_dump()
        for name, field in type(model).model_fields.items():
            if name in covered:
                continue
            wanted = self.implied.get(
                name, field.get_default(call_default_factory=True, validated_data=given)
            )
            if (value := getattr(model, name)) != wanted:
                reasons.append(f"{name}={value}")
        leaves = {leaf for rule in self.tensors for leaf in rule.leaves}
        lacking = (leaf for leaf in leaves_by_name(parameter_shapes(model)) if leaf not in leaves)
        if not reasons:
            reasons += lacking
        return reasons

    def tensor_of(self, leaf: str) -> str:
        """Return the name of the one tensor that holds a leaf without layers."""
        return next(rule.name for rule in self.tensors if leaf in rule.leaves)

    def is_quantized(self, content: Mapping[str, Any], source: str) -> bool:
        """Return True if the weights beside the `config.json` called `source` are quantized.

        Raises:
            UserError: they are, in a way that is not read.
        """
        given = content.get("quantization_config")
        if not given:
            return False
        method = given.get("quant_method") if isinstance(given, Mapping) else None
        if method is None or method != self.quantization:
            carried = "" if self.quantization is None else f", but for {self.quantization},"
            raise UserError(
                f"{source}: quantized weights (quantization_config){carried} are not carried; "
                "convert the checkpoint to bfloat16"
            )
        return True

    def _refuse_others(self, content: Mapping[str, Any], source: str) -> None:
        """Refuse keys that may change the logits in a way that is not carried."""
        for key, carried in {**self.fixed, **self.unwritten}.items():
            given = content.get(key, carried)
            if given != carried and (given is not None or carried):
                raise UserError(
                    f"{source}: {key} {shown(given)} is not carried; {carried!r} would be"
                )
        for key in self.rates:
            rate = content.get(key) or 0.0
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
                raise UserError(
                    f"{source}: {key} {shown(rate)} is no rate; a number below 1 would do"
                )
        refuse_wrong_values(content, source)
        known = {name for key in self.keys for name in (key.name, key.alias)}
        known |= self.fixed.keys() | self.unwritten.keys() | self.rates.keys() | self.ignored_keys
        known |= NEUTRAL_KEYS | {"quantization_config"}
        known |= ROPE_KEYS if self.has_rope else frozenset()
        if unknown := [key for key in content if key not in known]:
            raise UserError(
                f"{source}: {unknown[0][:80]} is no key that geojax knows of model_type "
                f"{self.model_type}; remove it if it leaves the logits as they are"
            )


def same_names(*names: str) -> tuple[ConfigKey, ...]:
    """Make required keys that have the name of their field."""
    return tuple(ConfigKey(name, (name,)) for name in names)


def _has_windows(fields: Mapping[str, Any]) -> bool:
    """Return False for a model of which each layer's type is told, and none has a window."""
    kinds = fields.get("layer_types")
    return not isinstance(kinds, list) or "sliding_attention" in kinds
