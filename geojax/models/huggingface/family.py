"""A family of Hugging Face models: its `config.json` and its tensors, each as one table.

Reading and writing go by the same table, so that what was read is written as it was.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from geojax.errors import UserError
from geojax.models.config import ModelConfig
from geojax.models.huggingface.rope import ROPE_KEYS, read_rope, write_rope
from geojax.models.parameters import parameter_shapes
from geojax.named_arrays import leaves_by_name

NEUTRAL_KEYS = frozenset(
    {"architectures", "dtype", "model_type", "torch_dtype", "transformers_version", "use_cache"}
    | {"bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "id2label", "label2id"}
    | {"output_attentions", "output_hidden_states", "output_router_logits", "return_dict"}
    | {"_attn_implementation", "_name_or_path", "problem_type", "task_specific_params"}
    | {"chunk_size_feed_forward", "is_encoder_decoder"}
)
"""Keys of any `config.json` that leave the logits as they are."""

TRAINING_FIELDS = frozenset(
    {"dropout", "initializer_range", "router_aux_loss_coef", "z_loss_coef"}
    | {"router_z_loss_coef", "mtp_loss_scaling_factor"}
)
"""Fields of a `ModelConfig` that leave the logits as they are: what they do ends with training."""


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

    def read(self, content: Mapping[str, Any], source: str) -> Any:
        """Return the fields' value in the `config.json` called `source`; None: their default.

        Raises:
            UserError: the key is required and missing.
        """
        name = self.name if self.alias is None or self.name in content else self.alias
        value = content.get(name, self.default)
        if callable(self.default) and content.get(self.name) is None:
            value = self.default(content)
        if value is REQUIRED or (value is None and self.default is REQUIRED):
            raise UserError(f"{source}: {self.name} is required and missing")
        return value


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
    """Keys of `config.json` of which one value is carried."""
    tensors: tuple[TensorRule, ...]
    """The name map."""
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Tensors that hold another one once more, by name with `{layer}`, for each module that
    predicts later tokens (`num_nextn_predict_layers`): they are written, and left unread."""
    required_keys: frozenset[str] = frozenset()
    """Keys of `fixed` that must be there: transformers has another default."""
    ignored_keys: frozenset[str] = frozenset()
    """Further keys of `config.json` that leave the logits as they are."""
    nested_in: str | None = None
    """Key of `config.json` that holds `keys`, beside those of parts that geojax leaves out."""
    ignored_tensors: str | None = None
    """Pattern of tensors that are no parameters: buffers that old checkpoints hold."""
    has_rope: bool = True
    """True if positions are rotary."""
    rope_theta: float = 10_000.0
    """Base of rotary positions of a `config.json` that does not tell it."""
    partial_rotary_factor: float = 1.0
    """Share of a head that is rotated, likewise."""
    rope_scaling: Mapping[str, Any] | None = None
    """Scaling of rotary positions, likewise; None: none."""
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
        fields = dict(self.implied)
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
                scaling=self.rope_scaling,
                by_layer_type="rope_local_base_freq" in fields,
            )
        return fields

    def write_config(self, model: ModelConfig) -> dict[str, Any]:
        """Translate `model`, which has no `unsupported_reason`, to the keys of `config.json`."""
        content: dict[str, Any] = {"architectures": [self.architecture]}
        content["model_type"] = self.model_type
        for key in self.keys:
            value = getattr(model, key.fields[0]) if key.write is None else key.write(model)
            content[key.name] = value
        content |= self.fixed
        if self.has_rope:
            content |= write_rope(model.rope_parameters, scaled=self.rope_scaling is not None)
        return content

    def unsupported_reason(self, model: ModelConfig) -> str | None:
        """Say which setting of `model` the family's `config.json` cannot express; None: none."""
        for key in self.keys:
            values = [getattr(model, field) for field in key.fields]
            if any(value != values[0] for value in values):
                pairs = zip(key.fields, values, strict=True)
                return " and ".join(f"{field}={value}" for field, value in pairs)
        covered = {field for key in self.keys for field in key.fields} | TRAINING_FIELDS
        if self.has_rope:
            covered.add("rope_parameters")
        if not model.is_moe:
            covered |= {"moe_intermediate_size", "norm_topk_prob"}
        given = model.model_dump()
        for name, field in ModelConfig.model_fields.items():
            if name in covered:
                continue
            wanted = self.implied.get(
                name, field.get_default(call_default_factory=True, validated_data=given)
            )
            if (value := getattr(model, name)) != wanted:
                return f"{name}={value}"
        leaves = {leaf for rule in self.tensors for leaf in rule.leaves}
        lacking = (leaf for leaf in leaves_by_name(parameter_shapes(model)) if leaf not in leaves)
        return next(lacking, None)

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
        for key, carried in self.fixed.items():
            given = content.get(key, "its default" if key in self.required_keys else carried)
            if given is not None and given != carried:
                raise UserError(f"{source}: {key} {given!r} is not carried; {carried!r} would be")
        known = {name for key in self.keys for name in (key.name, key.alias)}
        known |= self.fixed.keys() | self.ignored_keys | {"quantization_config"}
        known |= NEUTRAL_KEYS | (ROPE_KEYS if self.has_rope else frozenset())
        if unknown := [key for key in content if key not in known]:
            raise UserError(
                f"{source}: {unknown[0]} is no key that geojax knows of model_type "
                f"{self.model_type}; remove it if it leaves the logits as they are"
            )


def same_names(*names: str) -> tuple[ConfigKey, ...]:
    """Make required keys that have the name of their field."""
    return tuple(ConfigKey(name, (name,)) for name in names)
