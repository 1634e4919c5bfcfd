"""The settings of a precision that follows an FP8 recipe."""

import dataclasses

import pydantic

from geojax.precision import BackendName, Policy, PrecisionName, policy
from geojax.settings import Settings


class Fp8Settings(Settings):
    """How an "fp8-" precision is carried out."""

    backend: BackendName = "auto"
    """Who multiplies FP8 numbers: "reference" (plain JAX, anywhere), "xla" or "transformer_engine"
    (both by cuBLASLt on NVIDIA GPUs), or "auto", which takes the fastest that can."""

    plain_layers: pydantic.NonNegativeInt | None = None
    """So many layers at either end of the model are multiplied in bf16; null, as the recipe says: 1
    with fp8-current, else 0."""

    sites_share_scales: bool = False
    """fp8-delayed: whether all sites scale a tensor alike, by what any of them has seen: one small
    message a step between them. Otherwise no FP8 statistic leaves its site."""


def policy_of(precision: PrecisionName, settings: Fp8Settings) -> Policy:
    """The policy called `precision`, its recipe as the settings have it."""
    named = policy(precision)
    if named.recipe is None or settings.plain_layers is None:
        return named
    recipe = dataclasses.replace(named.recipe, plain_ends=settings.plain_layers)
    return dataclasses.replace(named, recipe=recipe)


def check_fp8(
    settings: Fp8Settings, precision: PrecisionName, *, layers: int, sites_are_stages: bool
) -> None:
    """Refuse settings that have no meaning.

    Args:
        settings: what is checked.
        precision: the run's.
        layers: of the model.
        sites_are_stages: whether a pipeline runs through the sites.

    Raises:
        ValueError: they are about another precision, leave nothing to FP8, or have sites share what
            they do not have together.
    """
    recipe = policy(precision).recipe
    if recipe is None and settings != Fp8Settings():
        raise ValueError(f"fp8 is about FP8 recipes, and precision is {precision}: leave it out")
    plain = settings.plain_layers or 0
    if plain and 2 * plain >= layers:
        raise ValueError(
            f"fp8.plain_layers={plain} leaves none of the model's {layers} layers to FP8; at most "
            f"{(layers - 1) // 2} would"
        )
    if not settings.sites_share_scales:
        return
    if recipe is None or recipe.history == 0:
        raise ValueError(
            "fp8.sites_share_scales is about the histories of precision fp8-delayed, and "
            f"precision is {precision}: leave it out"
        )
    if sites_are_stages:
        raise ValueError(
            "fp8.sites_share_scales is about sites that hold the same layers, and with "
            "dc.role=stage they hold different ones: leave it out"
        )
