"""The sizes and choices that make one decoder-only transformer, by Hugging Face's names.

Keys are those of `config.json`, flat, as Llama and Qwen3-MoE have them; a few, such as `norm`, have
no counterpart there, because the architecture's class implies them.
"""

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import pydantic

from geojax.errors import UserError
from geojax.models.lora import LoraSettings
from geojax.quantities import Length
from geojax.settings import Settings, load_with_origins, preset_path, validate
from geojax.suggestions import listed

_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Keys that each scaling of rotary positions needs."""
_ROPE_OPTIONS = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
}
"""Keys that a scaling may have besides."""


class RopeParameters(Settings):
    """Rotary positions: their base, their share of a head, and their scaling to longer contexts.

    `linear`: all wavelengths grow by `factor` (Chen et al. 2023, "Extending Context Window of Large
    Language Models via Positional Interpolation").

    `llama3`: those above `original_max_position_embeddings / low_freq_factor` grow by `factor`,
    those below `original_max_position_embeddings / high_freq_factor` are kept, and those between
    are blended ("The Llama 3 Herd of Models", 2024, and the model code that Meta released).

    `yarn`: likewise by rotations in the original context, between `beta_slow` and `beta_fast`, and
    attention is sharpened (Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large
    Language Models").
    """

    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    """Scaling of the frequencies."""
    rope_theta: float = pydantic.Field(default=10_000.0, gt=1, le=1e12)
    """Base of the frequencies: wavelengths run from 2 pi to almost 2 pi times the base."""
    partial_rotary_factor: float = pydantic.Field(default=1.0, gt=0, le=1)
    """Share of each head that is rotated (its first dims). The other dims carry no position."""
    factor: float | None = pydantic.Field(default=None, ge=1e-3, le=1e6)
    """linear, llama3, yarn: factor by which the wavelengths grow; with llama3 and yarn only those
    of low frequencies."""
    low_freq_factor: float | None = pydantic.Field(default=None, ge=1e-3, le=1e6)
    """llama3: a frequency is low if it makes fewer rotations than this in the original context."""
    high_freq_factor: float | None = pydantic.Field(default=None, ge=1e-3, le=1e6)
    """llama3: a frequency is high if it makes more rotations than this in the original context."""
    original_max_position_embeddings: Length | None = None
    """llama3, yarn: context length of the training before the extension."""
    beta_fast: float | None = pydantic.Field(default=None, ge=1e-3, le=1e6)
    """yarn: a frequency is kept if it makes more rotations than this in the original context.
    Default: 32."""
    beta_slow: float | None = pydantic.Field(default=None, ge=1e-3, le=1e6)
    """yarn: a frequency is low if it makes fewer rotations than this in the original context.
    Default: 1."""
    truncate: bool | None = None
    """yarn: round the range of dims between beta_fast and beta_slow outwards to whole numbers.
    Default: true; false in gpt-oss."""
    attention_factor: float | None = pydantic.Field(default=None, ge=1e-3, le=1e3)
    """yarn: factor of rotated queries and keys. Default: 0.1 ln(factor) + 1. Default with mscale:
    (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)."""
    mscale: float | None = pydantic.Field(default=None, ge=1e-3, le=1e3)
    """yarn: sharpening of the rotated dims (DeepSeek). Requires mscale_all_dim."""
    mscale_all_dim: float | None = pydantic.Field(default=None, ge=1e-3, le=1e3)
    """yarn: sharpening of all dims (DeepSeek). Latent attention multiplies its scores by (0.1
    mscale_all_dim ln(factor) + 1)^2."""

    @pydantic.model_validator(mode="after")
    def _scaling_is_complete(self) -> Self:
        needed = _ROPE_KEYS[self.rope_type]
        allowed = {*needed, *_ROPE_OPTIONS.get(self.rope_type, ())}
        others = {key for keys in (*_ROPE_KEYS.values(), *_ROPE_OPTIONS.values()) for key in keys}
        for key in needed:
            if getattr(self, key) is None:
                raise ValueError(f"rope_type {self.rope_type} needs {key}")
        for key in sorted(others - allowed):
            if getattr(self, key) is not None:
                raise ValueError(f"rope_type {self.rope_type} takes no {key}")
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            below, above = getattr(self, low), getattr(self, high)
            if below is None or above is None:
                continue
            if above < below or (above == below and self.rope_type == "llama3"):
                raise ValueError(f"{high} {above:g} must be above {low} {below:g}")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError("mscale and mscale_all_dim belong together; set both or neither")
        return self


def _attention_heads(given: Mapping[str, Any]) -> int:
    return int(given["num_attention_heads"])


def _even_head_dim(given: Mapping[str, Any]) -> int:
    if given["kv_lora_rank"]:
        return int(given["qk_nope_head_dim"] + given["qk_rope_head_dim"])
    return int(given["hidden_size"] // given["num_attention_heads"])


def _head_width(given: Mapping[str, Any]) -> int:
    return int(given["head_dim"])


def _dense_width(given: Mapping[str, Any]) -> int:
    return int(given["intermediate_size"])


LATENT_NORM_EPS = 1e-6
"""Number that `transformers` adds to the mean square of latents."""

LayerType = Literal["full_attention", "sliding_attention"]
"""Kind of a layer's attention."""


def _has_gate(given: Mapping[str, Any]) -> bool:
    return bool(given["hidden_act"] == "silu")


def _alike_layers(given: Mapping[str, Any]) -> tuple[LayerType, ...]:
    return ("full_attention" if given["sliding_window"] is None else "sliding_attention",)


class ModelConfig(Settings):
    """One decoder-only transformer; the presets in `configs/model/` are values of this class."""

    block_class: ClassVar[Any] = None
    """Subclass of `geojax.models.block.Block` that makes the layers of a family; None: `Block`."""

    num_hidden_layers: int = pydantic.Field(gt=0, le=2**11)
    """Transformer layers, each an attention block and a feed-forward block."""
    hidden_size: int = pydantic.Field(gt=0, le=2**20)
    """Width of the residual stream."""
    num_attention_heads: int = pydantic.Field(gt=0, le=2**14)
    """Query heads."""
    num_key_value_heads: int = pydantic.Field(default_factory=_attention_heads, gt=0, le=2**14)
    """Key and value heads. Each serves num_attention_heads / num_key_value_heads query heads.
    Default: `num_attention_heads`."""
    q_lora_rank: int = pydantic.Field(default=0, ge=0, le=2**16)
    """Width of the latent from which queries are projected; requires `kv_lora_rank`. 0: queries are
    projected from the residual stream, as in DeepSeek-V2-Lite."""
    kv_lora_rank: int = pydantic.Field(default=0, ge=0, le=2**16)
    """Width of the latent from which keys and values are projected (multi-head latent attention,
    "DeepSeek-V2", 2024, section 2.1). 0: they are projected from the residual stream."""
    qk_nope_head_dim: int = pydantic.Field(default=0, ge=0, le=2**14)
    """Latent attention: dims of a head's query and key that carry no position."""
    qk_rope_head_dim: int = pydantic.Field(default=0, ge=0, le=2**14)
    """Latent attention: dims that are rotated. All heads share these dims of the key."""
    head_dim: int = pydantic.Field(default_factory=_even_head_dim, gt=0, le=2**14)
    """Width of one head's query and key. Default: hidden_size / num_attention_heads; in latent
    attention qk_nope_head_dim + qk_rope_head_dim."""
    v_head_dim: int = pydantic.Field(default_factory=_head_width, gt=0, le=2**14)
    """Width of one head's value. Only latent attention may set a value other than `head_dim`."""
    intermediate_size: int = pydantic.Field(gt=0, le=2**24)
    """Width between the two matmuls of a dense feed-forward block. In SwiGLU gate and up projection
    each have this width."""
    vocab_size: int = pydantic.Field(gt=0, le=2**24)
    """Number of tokens. A run's config may leave this key out, or set it to null over a preset. The
    number then follows from the data's tokenizer, padded to a multiple of 128."""
    max_position_embeddings: Length
    """Longest sequence; with learned positions, their number."""
    norm: Literal["layernorm", "rmsnorm", "layernorm1p", "rmsnorm1p"] = "rmsnorm"
    """Norm of the blocks. LayerNorm has a bias. LayerNorm1p (Nemotron) and RMSNorm1p (Gemma) store
    the scale minus 1, so that weight decay pulls the scale to 1."""
    sandwich_norm: bool = False
    """Norm each block's output too, before it is added to the residual stream, as in Gemma 2 and 3.
    Requires a dense model."""
    rms_norm_eps: float = pydantic.Field(default=1e-5, ge=1e-15, le=1)
    """Number added to the variance (RMSNorm: the mean square) before its root is taken."""
    latent_norm_eps: float = pydantic.Field(default=LATENT_NORM_EPS, ge=1e-15, le=1)
    """Latent attention: number added in the norms of the latents. `transformers` adds 1e-6,
    whatever `rms_norm_eps` is."""
    hidden_act: Literal["gelu_pytorch_tanh", "relu2", "silu"] = "silu"
    """Activation of the feed-forward block: `silu` (Llama), `gelu_pytorch_tanh` (GPT-3, Gemma) or
    `relu2` (Nemotron)."""
    gated: bool = pydantic.Field(default_factory=_has_gate)
    """Multiply the up projection by the activation of a second projection, the gate. Default: true
    with `silu` (SwiGLU), otherwise false. Gemma has a gate with GELU."""
    swiglu_limit: float | None = pydantic.Field(default=None, ge=1e-3, le=1e6)
    """Bound of SwiGLU, as in gpt-oss: the gate is bounded above, and the up projection on both
    sides. The block computes (up + 1) * gate * sigmoid(swiglu_alpha * gate). null: plain SwiGLU."""
    swiglu_alpha: float = pydantic.Field(default=1.702, ge=1e-3, le=1e3)
    """Factor of the gate inside the sigmoid. Requires `swiglu_limit`; plain SwiGLU has 1."""
    position_embedding_type: Literal["learned_absolute", "rope"] = "rope"
    """Position embedding. Learned positions are added to the embedding; rotary positions rotate
    queries and keys."""
    rope_parameters: RopeParameters = RopeParameters()
    """Base, share and scaling of rotary positions."""
    rope_local_base_freq: float | None = pydantic.Field(default=None, gt=1, le=1e12)
    """Base of unscaled rotary positions in layers with a window, as in Gemma 3. null:
    rope_parameters apply to all layers."""
    query_pre_attn_scalar: int = pydantic.Field(default_factory=_head_width, gt=0, le=2**20)
    """Attention divides its scores by the square root of this number. Default: `head_dim`."""
    attn_logit_softcapping: float | None = pydantic.Field(default=None, ge=1e-3, le=1e6)
    """Bound c of attention's scores, which become c tanh(score / c), as in Gemma 2. cuDNN's
    attention does not support a bound. null: none."""
    sliding_window: Length | None = None
    """Positions that a layer with a window attends to: the token's own and those right before
    (Mistral). null: every layer attends to all positions."""
    layer_types: tuple[LayerType, ...] = pydantic.Field(
        default_factory=_alike_layers, min_length=1, max_length=2**11
    )
    """Each layer's attention, `full_attention` or `sliding_attention`. A list shorter than the
    layers repeats. Default: every layer has the window, if `sliding_window` is set."""
    rope_interleave: bool = False
    """Latent attention: rotate dims 2 i and 2 i + 1 together, instead of i and i + half."""
    use_attention_sinks: bool = False
    """Give each head a learned score, a sink, which takes part in every query's softmax and has no
    value (gpt-oss)."""
    qkv_bias: bool = False
    """Bias of the query, key and value projections."""
    use_qk_norm: bool = False
    """RMSNorm each head's queries and keys before they are rotated, as in Qwen 3. All heads share
    one scale for queries and one for keys."""
    attention_output_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    """Bias of a dense feed-forward block's projections; `moe_bias` sets the experts' biases."""
    tie_word_embeddings: bool = False
    """Use the transpose of the token embedding as the output head."""
    scale_embeddings: bool = False
    """Multiply the embedded tokens by the square root of `hidden_size`, as in Gemma."""
    final_logit_softcapping: float | None = pydantic.Field(default=None, ge=1e-3, le=1e6)
    """Bound c of the logits, which become c tanh(logit / c), as in Gemma 2. null: none."""
    z_loss_coef: float = pydantic.Field(default=0.0, ge=0, le=1e3)
    """Weight of the z-loss: the squared log of the softmax's denominator, which keeps logits from
    drifting (PaLM: 1e-4). Validation leaves the z-loss out."""
    dropout: float = pydantic.Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the embedding and of both residual branches. Attention weights have no
    dropout."""
    initializer_range: float = pydantic.Field(default=0.02, ge=1e-9, le=1)
    """Standard deviation of the initial matrices. Residual outputs start with 1/sqrt(2 layers) of
    it."""

    num_nextn_predict_layers: int = pydantic.Field(default=0, ge=0, le=2**4)
    """Modules that predict tokens after the next one, only in training (multi-token prediction,
    "DeepSeek-V3", 2024, section 2.2). A pipeline keeps them with the head."""
    mtp_loss_scaling_factor: float = pydantic.Field(default=0.1, gt=0, le=1e3)
    """Weight of the mean loss of the multi-token prediction modules."""
    num_experts: int = pydantic.Field(default=0, ge=0, le=2**14)
    """Experts of a layer, which replace its dense feed-forward block. 0: a dense model."""
    first_k_dense_replace: int = pydantic.Field(default=0, ge=0, le=2**6)
    """Number of first layers that keep a dense feed-forward block. They lie with the embedding, on
    the first pipeline stage. FP8 recipes leave their matmuls in the compute dtype."""
    num_experts_per_tok: int = pydantic.Field(default=0, ge=0, le=2**14)
    """Experts that the router chooses for a token (k)."""
    moe_intermediate_size: int = pydantic.Field(default_factory=_dense_width, gt=0, le=2**24)
    """Width of each expert. Default: `intermediate_size`."""
    moe_bias: bool = False
    """Bias of the router's logits and of the routed experts' projections, as in gpt-oss."""
    n_shared_experts: int = pydantic.Field(default=0, ge=0, le=2**10)
    """Experts that process every token, without a gate (DeepSeek). They have the width of a routed
    expert."""
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """Score of an expert: the softmax over all logits, or the sigmoid of its own logit."""
    norm_topk_prob: bool = True
    """Scale a token's k gates to sum 1, as in Mixtral. false: gates are the k largest scores, as in
    DeepSeekMoE."""
    routed_scaling_factor: float = pydantic.Field(default=1.0, ge=1e-3, le=1e3)
    """Factor of the gates (DeepSeek)."""
    n_group: int = pydantic.Field(default=1, gt=0, le=2**10)
    """Groups of consecutive experts, for example one per node. A token goes to the `topk_group`
    groups with the largest sums of their two best scores."""
    topk_group: int = pydantic.Field(default=1, gt=0, le=2**10)
    """Groups that a token goes to."""
    use_router_bias: bool = False
    """Choose experts by score plus a bias, which leaves the gates unchanged. Each step raises the
    bias of experts with fewer tokens than the mean, and lowers the others by
    `optimizer.router_bias_rate`. (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy
    for Mixture-of-Experts".)"""
    capacity_factor: float | None = pydantic.Field(default=None, ge=1e-3, le=2**14)
    """Capacity: an expert takes the first ceil(capacity_factor * S * k / E) tokens of a sequence
    and drops the others. null: it takes all (dropless)."""
    router_z_loss_coef: float = pydantic.Field(default=0.0, ge=0, le=1e3)
    """Weight of the router's z-loss: the squared log of the sum of exp(logit) (ST-MoE: 1e-3). The
    loss takes the mean over a sequence's tokens and the sum over layers."""
    router_aux_loss_coef: float = pydantic.Field(default=0.01, ge=0, le=1e3)
    """Weight of the load-balancing loss in a sequence's loss, summed over layers."""

    lora: LoraSettings | None = None
    """Low-rank adapters (LoRA), which are trained in place of the model's own weights. null: all
    weights are trained."""

    @property
    def base(self) -> Self:
        """The model without adapters."""
        return self if self.lora is None else self.model_copy(update={"lora": None})

    @property
    def is_moe(self) -> bool:
        """True where experts take the place of the dense feed-forward block."""
        return self.num_experts > 0

    @property
    def local_rope_parameters(self) -> RopeParameters | None:
        """Rotary positions of layers with a window; None: they have those of all."""
        if self.rope_local_base_freq is None:
            return None
        share = self.rope_parameters.partial_rotary_factor
        return RopeParameters(rope_theta=self.rope_local_base_freq, partial_rotary_factor=share)

    @property
    def has_window(self) -> tuple[bool, ...]:
        """True for the layers with a window, of the first period of layers that repeats."""
        return tuple(kind == "sliding_attention" for kind in self.layer_types)

    @property
    def head_reads_tokens(self) -> bool:
        """True if the table of tokens is also read behind the last layer."""
        return self.tie_word_embeddings or self.num_nextn_predict_layers > 0

    @property
    def is_random(self) -> bool:
        """True if training draws masks of dropout."""
        return self.dropout > 0

    @property
    def for_evaluation(self) -> Self:
        """A copy whose loss is the mean log-likelihood of next tokens alone."""
        return self.without_later_tokens.model_copy(update={"z_loss_coef": 0.0})

    @property
    def without_later_tokens(self) -> Self:
        """A copy without modules for later tokens."""
        return self.model_copy(update={"num_nextn_predict_layers": 0})

    @property
    def num_stacked_layers(self) -> int:
        """Layers of one kind, stacked and shared among stages: all but the first dense ones."""
        return self.num_hidden_layers - self.first_k_dense_replace

    def with_stacked_layers(self, count: int) -> Self:
        """Return a copy with `count` stacked layers and as many first dense ones."""
        return self.model_copy(update={"num_hidden_layers": count + self.first_k_dense_replace})

    @property
    def has_latent_attention(self) -> bool:
        """True where queries, keys and values are made of latents."""
        return self.kv_lora_rank > 0

    @property
    def latent_width(self) -> int:
        """Numbers that latent attention makes of a token: its latents and the key's shared part."""
        return self.q_lora_rank + self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def projected_width(self) -> int:
        """Numbers of a token that the heads' queries, keys and values are projections of."""
        if not self.has_latent_attention:
            return self.hidden_size
        return self.latent_width + (0 if self.q_lora_rank else self.hidden_size)

    @property
    def shared_expert_intermediate_size(self) -> int:
        """Width of the shared experts side by side, which are one dense feed-forward block."""
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that rotary positions rotate."""
        if self.has_latent_attention:
            return self.qk_rope_head_dim
        return round(self.rope_parameters.partial_rotary_factor * self.head_dim)

    @pydantic.model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        even = not self.has_latent_attention and "head_dim" not in self.model_fields_set
        if even and self.hidden_size % heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {heads}; "
                "choose one that is, or give head_dim"
            )
        if heads % kv_heads:
            fitting = [n for n in range(1, heads + 1) if heads % n == 0]
            raise ValueError(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; "
                f"num_key_value_heads can be {listed(fitting)}"
            )
        return self

    @pydantic.field_validator("rope_local_base_freq")
    @classmethod
    def _another_base(cls, base: float | None, info: pydantic.ValidationInfo) -> float | None:
        of_all = info.data.get("rope_parameters", RopeParameters())
        is_same = of_all.rope_type == "default" and base == of_all.rope_theta
        return None if is_same else base

    @pydantic.field_validator("layer_types")
    @classmethod
    def _shortest_period(
        cls, kinds: tuple[LayerType, ...], info: pydantic.ValidationInfo
    ) -> tuple[LayerType, ...]:
        layers = info.data.get("num_hidden_layers", len(kinds))
        if len(kinds) > layers:
            raise ValueError(f"has {len(kinds)} entries for {layers} layers; it can have fewer")
        every = [kinds[layer % len(kinds)] for layer in range(layers)]
        periods = (
            period
            for period in range(1, layers + 1)
            if all(kind == every[layer % period] for layer, kind in enumerate(every))
        )
        return tuple(every[: next(periods)])

    @pydantic.model_validator(mode="after")
    def _windows_fit(self) -> Self:
        if any(self.has_window) and self.sliding_window is None:
            raise ValueError(
                "layer_types with sliding_attention requires sliding_window; set it, or remove "
                "layer_types"
            )
        if not any(self.has_window) and self.sliding_window is not None:
            raise ValueError(
                "sliding_window requires a layer of the type sliding_attention; remove "
                "sliding_window, or change layer_types"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _latents_fit(self) -> Self:
        if not self.has_latent_attention:
            for key in ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "rope_interleave"):
                if getattr(self, key):
                    raise ValueError(f"{key} requires kv_lora_rank; remove {key}, or set both")
            if self.latent_norm_eps != LATENT_NORM_EPS:
                raise ValueError(
                    "latent_norm_eps requires kv_lora_rank; remove latent_norm_eps, or set both"
                )
            if self.v_head_dim != self.head_dim:
                raise ValueError(
                    f"v_head_dim {self.v_head_dim} other than head_dim {self.head_dim} requires "
                    "kv_lora_rank; remove v_head_dim, or set kv_lora_rank"
                )
            return self
        for key in ("qk_nope_head_dim", "qk_rope_head_dim"):
            if not getattr(self, key):
                raise ValueError(f"latent attention (kv_lora_rank) needs {key}; set it")
        if self.head_dim != self.qk_nope_head_dim + self.qk_rope_head_dim:
            raise ValueError(
                f"head_dim {self.head_dim} must be qk_nope_head_dim + qk_rope_head_dim = "
                f"{self.qk_nope_head_dim + self.qk_rope_head_dim}; remove head_dim"
            )
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                f"num_key_value_heads {self.num_key_value_heads} must be num_attention_heads "
                f"{self.num_attention_heads} in latent attention; remove num_key_value_heads"
            )
        wrong = {
            "norm=rmsnorm": self.norm == "rmsnorm",
            "position_embedding_type=rope": self.position_embedding_type == "rope",
            "use_qk_norm=false": not self.use_qk_norm,
            "use_attention_sinks=false": not self.use_attention_sinks,
            "qkv_bias=false": not self.qkv_bias,
            "partial_rotary_factor=1": self.rope_parameters.partial_rotary_factor == 1,
        }
        for needed, given in wrong.items():
            if not given:
                raise ValueError(f"latent attention (kv_lora_rank) requires {needed}; set it")
        return self

    @pydantic.model_validator(mode="after")
    def _norms_fit(self) -> Self:
        if self.use_qk_norm and not self.norm.startswith("rmsnorm"):
            raise ValueError(
                f"use_qk_norm requires norm=rmsnorm; got {self.norm}. Remove use_qk_norm, or set "
                "norm"
            )
        if self.sandwich_norm and self.num_experts:
            raise ValueError(
                "sandwich_norm requires a dense model; remove sandwich_norm, or num_experts"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _gates_fit(self) -> Self:
        if self.swiglu_limit is not None and not (self.gated and self.hidden_act == "silu"):
            raise ValueError(
                f"swiglu_limit requires hidden_act=silu and gated=true; got {self.hidden_act} and "
                f"{str(self.gated).lower()}. Remove swiglu_limit, or set both"
            )
        alpha = type(self).model_fields["swiglu_alpha"].default
        if self.swiglu_limit is None and self.swiglu_alpha != alpha:
            raise ValueError("swiglu_alpha requires swiglu_limit; set it, or remove swiglu_alpha")
        return self

    @pydantic.model_validator(mode="after")
    def _positions_fit(self) -> Self:
        if self.position_embedding_type == "learned_absolute":
            if self.num_nextn_predict_layers:
                raise ValueError(
                    "num_nextn_predict_layers requires position_embedding_type=rope; got "
                    "learned_absolute. Remove num_nextn_predict_layers, or set "
                    "position_embedding_type"
                )
            if self.rope_parameters != RopeParameters():
                raise ValueError(
                    "rope_parameters requires position_embedding_type=rope; got learned_absolute. "
                    "Remove rope_parameters, or set position_embedding_type"
                )
            if self.rope_local_base_freq is not None:
                raise ValueError(
                    "rope_local_base_freq requires position_embedding_type=rope; got "
                    "learned_absolute. Remove rope_local_base_freq, or set position_embedding_type"
                )
            return self
        if self.has_latent_attention:
            if self.qk_rope_head_dim % 2:
                raise ValueError(
                    f"qk_rope_head_dim {self.qk_rope_head_dim} must be even; rotary positions "
                    "rotate pairs"
                )
            return self
        if self.rope_local_base_freq is not None and self.sliding_window is None:
            raise ValueError(
                "rope_local_base_freq requires sliding_window; set it, or remove "
                "rope_local_base_freq"
            )
        share = self.rope_parameters.partial_rotary_factor
        rotated = share * self.head_dim
        if not math.isclose(rotated, round(rotated)) or round(rotated) % 2:
            raise ValueError(
                f"rope_parameters.partial_rotary_factor {share:g} of a head of {self.head_dim} "
                f"dims is {rotated:g} dims; rotary positions rotate pairs, so it must be even"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _adapters_fit(self) -> Self:
        if self.lora is None:
            return self
        if self.lora.rank > self.hidden_size:
            raise ValueError(
                f"lora.rank {self.lora.rank} must be at most hidden_size {self.hidden_size}; no "
                "update of a layer has a higher rank"
            )
        if self.has_latent_attention:
            raise ValueError("lora requires attention without latents (kv_lora_rank); remove lora")
        if self.num_nextn_predict_layers:
            raise ValueError("lora requires num_nextn_predict_layers=0; remove lora, or set that")
        if self.lora.target_modules == "all-linear":
            return self
        only_experts = self.is_moe and not (self.n_shared_experts or self.first_k_dense_replace)
        lacking = {
            "gate_proj": only_experts or not self.gated,
            "up_proj": only_experts,
            "down_proj": only_experts,
        }
        for name in self.lora.target_modules:
            if lacking.get(name):
                raise ValueError(
                    f"lora.target_modules: the model has no {name} outside of routed experts, "
                    f"which have no adapters; remove {name}"
                )
        return self

    @pydantic.model_validator(mode="after")
    def _experts_fit(self) -> Self:
        if self.is_moe and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} does not fit num_experts "
                f"{self.num_experts}; it can be 1 to {self.num_experts}"
            )
        if not self.is_moe:
            needing = ("num_experts_per_tok", "n_shared_experts", "capacity_factor")
            for key in (*needing, "first_k_dense_replace", "use_router_bias", "moe_bias"):
                if getattr(self, key):
                    raise ValueError(f"{key} requires num_experts; remove {key}, or set both")
        if self.first_k_dense_replace >= self.num_hidden_layers:
            raise ValueError(
                f"first_k_dense_replace {self.first_k_dense_replace} must be below "
                f"num_hidden_layers {self.num_hidden_layers}"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _groups_fit(self) -> Self:
        if self.n_group == 1 and self.topk_group == 1:
            return self
        if self.scoring_func != "sigmoid":
            raise ValueError(
                f"n_group {self.n_group} requires scoring_func=sigmoid; got {self.scoring_func}"
            )
        size, rest = divmod(self.num_experts, self.n_group)
        if rest or size < 2:
            raise ValueError(
                f"n_group {self.n_group} must divide num_experts {self.num_experts} into groups of "
                "two or more"
            )
        if self.topk_group > self.n_group or self.num_experts_per_tok > self.topk_group * size:
            raise ValueError(
                f"topk_group {self.topk_group} of {self.n_group} groups of {size} experts must "
                f"hold num_experts_per_tok {self.num_experts_per_tok}"
            )
        return self

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with `changes`; defaults that depend on them are taken anew."""
        return type(self)(**self.model_dump(exclude_unset=True) | changes)

    @classmethod
    def load(cls, name_or_path: str | Path) -> "ModelConfig":
        """Read the preset of that name in `configs/model/`, or the YAML file at that path.

        A text that ends in .yaml or .yml or holds a slash is a path; any other is a name.

        Raises:
            UserError: no such preset or file, or a setting in it is wrong.
        """
        text = str(name_or_path)
        is_path = isinstance(name_or_path, Path) or "/" in text or text.endswith((".yaml", ".yml"))
        path = Path(text) if is_path else preset_path("model", text)
        content, origins = load_with_origins(path)
        source = origins if is_path else f"model preset '{text}'"
        return validate(family_settings(content), content, source)


def family_settings(content: Any) -> type[ModelConfig]:
    """Return the class that validates a mapping: by `model_type` the one of its family.

    Raises:
        UserError: no family has settings of its own by that name.
    """
    if not isinstance(content, Mapping) or "model_type" not in content:
        return ModelConfig
    importlib.import_module("geojax.models.families")  # each file may define settings
    own = {each.model_fields["model_type"].default: each for each in ModelConfig.__subclasses__()}
    if (name := content["model_type"]) not in own:
        raise UserError(f"model_type: '{name}' is none of {listed(sorted(own))}")
    return own[name]
