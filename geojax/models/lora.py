"""Low-rank adapters (LoRA) beside the kernels of linear layers, which are frozen.

    y = x w + (alpha / rank) (x a) b        a [inputs, rank], b [rank, outputs]

(Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"), or with alpha / sqrt(rank)
(Kalajdzievski 2023, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA"). The adapters
of a layer's kernel lie beside it in the parameter tree, as "lora_a" and "lora_b". An `a` begins as
`peft` draws it and a `b` as zero, so that the model begins as the one that is adapted.
"""

import math
import typing
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pydantic

from geojax.settings import Settings

TargetModule = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Name of a linear layer as Llama and its descendants call it."""

LORA_A, LORA_B = "lora_a", "lora_b"


class LoraSettings(Settings):
    """Low-rank adapters: they are trained, and the model's own weights are frozen."""

    rank: int = pydantic.Field(default=8, gt=0, le=2**14)
    """Rank of an adapter (peft's `r`)."""
    alpha: float = pydantic.Field(default=8.0, ge=1e-6, le=1e6)
    """Scale: an adapter's contribution is multiplied by alpha / rank (peft's `lora_alpha`)."""
    use_rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead, so that a high rank learns as fast as a low one
    (peft's `use_rslora`)."""
    target_modules: Literal["all-linear"] | tuple[TargetModule, ...] = "all-linear"
    """Linear layers with adapters, by Llama's names. "all-linear": all linear layers of attention,
    dense feed-forward blocks and shared experts. Routed experts, router and head never have
    adapters."""

    @pydantic.field_validator("target_modules")
    @classmethod
    def _has_targets(cls, value: Any) -> Any:
        if not value:
            raise ValueError("names no layer; all-linear, or a list such as [q_proj, v_proj] would")
        if value != "all-linear" and len(set(value)) < len(value):
            twice = next(name for name in value if value.count(name) > 1)
            raise ValueError(f"names {twice} twice; once would do")
        return value

    @property
    def targets(self) -> tuple[TargetModule, ...]:
        """The names of the linear layers that have adapters, if the model has them."""
        if self.target_modules == "all-linear":
            return typing.get_args(TargetModule)
        return self.target_modules

    @property
    def scale(self) -> float:
        """Factor of an adapter's contribution."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def adapter_names(name: str) -> tuple[str, str] | None:
    """Return the dotted names of the adapter that a kernel may have; None: it is no kernel."""
    owner, _, last = name.rpartition(".")
    return (f"{owner}.{LORA_A}", f"{owner}.{LORA_B}") if last == "kernel" else None


def draw_lora_a(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draw an initial `lora_a`, uniform up to 1 / sqrt(inputs), as peft does; a `lora_b` is 0."""
    bound = 1 / math.sqrt(shape[-2])
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)


def scale_adapters(parameters: Any, settings: LoraSettings) -> Any:
    """Multiply every `lora_b` of a layer's parameters by the factor of its contribution."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            leaf * jnp.asarray(settings.scale, leaf.dtype) if path[-1].key == LORA_B else leaf
        ),
        parameters,
    )


def merged_kernel(kernel: Any, a: Any, b: Any, settings: LoraSettings) -> Any:
    """Add an adapter to its kernel, in at least float32; arrays of JAX or NumPy."""
    wide = jnp.promote_types(kernel.dtype, jnp.float32)
    return kernel.astype(wide) + settings.scale * (a.astype(wide) @ b.astype(wide))


def merge_adapters(parameters: Any, settings: LoraSettings) -> Any:
    """Return the parameters of the model without adapters that computes the same, in their dtypes.

    Args:
        parameters: a tree of arrays like `parameter_shapes`, or any part of it.
        settings: the adapters'.
    """
    if not isinstance(parameters, dict):
        return parameters
    if LORA_A not in parameters:
        return {name: merge_adapters(own, settings) for name, own in parameters.items()}
    kernel, a, b = (parameters[name] for name in ("kernel", LORA_A, LORA_B))
    others = {name: own for name, own in parameters.items() if name not in (LORA_A, LORA_B)}
    return others | {"kernel": merged_kernel(kernel, a, b, settings).astype(kernel.dtype)}
