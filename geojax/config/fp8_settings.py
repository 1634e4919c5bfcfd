"""Settings of a precision that follows an FP8 recipe."""

import dataclasses

import pydantic

from geojax.layout_names import PrecisionName
from geojax.precision import BackendName, Policy, policy
from geojax.settings import Settings


class Fp8Settings(Settings):
    """Settings of an "fp8-" precision."""

    backend: BackendName = "auto"
    """Implementation of FP8 matmuls. "reference": plain JAX, anywhere. "xla", "transformer_engine":
    cuBLASLt on NVIDIA GPUs. "auto": the fastest that can run."""

    num_bf16_layers_per_end: int | None = pydantic.Field(default=None, ge=0, le=2**14)
    """Layers at each end of the model whose matmuls stay in bf16. null: 1 with fp8-current,
    otherwise 0."""

    share_amax_across_dc: bool = False
    """fp8-delayed: scale a tensor by its largest magnitude (amax) on any site, so that all sites
    scale alike. The sites exchange one small message a step. false: no FP8 statistic leaves its
    site."""


def policy_of(precision: PrecisionName, settings: Fp8Settings) -> Policy:
    """Return the policy called `precision`, its recipe as the settings have it."""
    named = policy(precision)
    if named.recipe is None or settings.num_bf16_layers_per_end is None:
        return named
    recipe = dataclasses.replace(
        named.recipe, num_bf16_layers_per_end=settings.num_bf16_layers_per_end
    )
    return dataclasses.replace(named, recipe=recipe)


def check_fp8(
    settings: Fp8Settings, precision: PrecisionName, *, layers: int, sites_are_stages: bool
) -> None:
    """Refuse settings that have no meaning.

    Args:
        settings: the settings to check.
        precision: precision of the run.
        layers: number of layers of the model.
        sites_are_stages: a pipeline runs through the sites.

    Raises:
        ValueError: they belong to another precision, leave nothing to FP8, or have sites share the
            statistics of layers that they do not have in common.
    """
    recipe = policy(precision).recipe
    if recipe is None and settings != Fp8Settings():
        raise ValueError(
            f"fp8 requires an fp8- precision; got {precision}. Remove fp8, or set precision"
        )
    plain = settings.num_bf16_layers_per_end or 0
    if plain and 2 * plain >= layers:
        raise ValueError(
            f"fp8.num_bf16_layers_per_end={plain} leaves none of the model's {layers} layers to "
            f"FP8; it can be at most {(layers - 1) // 2}"
        )
    if not settings.share_amax_across_dc:
        return
    if recipe is None or recipe.history == 0:
        raise ValueError(
            f"fp8.share_amax_across_dc requires precision=fp8-delayed; got {precision}. Remove "
            "share_amax_across_dc, or set precision"
        )
    if sites_are_stages:
        raise ValueError(
            "fp8.share_amax_across_dc requires dc.role=data: with dc.role=stage the sites hold "
            "different layers. Remove share_amax_across_dc"
        )
