"""Who multiplies FP8 numbers where, and why."""

from typing import Literal, NamedTuple

from geojax.errors import UserError
from geojax.mesh import GPU_PLATFORMS
from geojax.precision.products import Backend
from geojax.precision.recipes import Recipe

BackendName = Literal["auto", "reference", "xla"]
"""auto: xla where it can, else reference. Others: see `geojax.precision.Backend`."""


class BackendChoice(NamedTuple):
    """A backend, and one line that says why it was chosen."""

    name: Backend
    reason: str


def chosen_backend(recipe: Recipe, platform: str, asked: BackendName = "auto") -> BackendChoice:
    """The backend for a program that is compiled for `platform`.

    Raises:
        UserError: the one that is asked for cannot run; with what is missing.
    """
    if asked == "reference":
        return BackendChoice("reference", f"FP8 recipe {recipe.name}: reference, as asked")
    obstacle = _obstacle(recipe, platform)
    if asked == "auto":
        if obstacle:
            return BackendChoice("reference", f"FP8 recipe {recipe.name}: reference, {obstacle}")
        return BackendChoice("xla", f"FP8 recipe {recipe.name}: products of cuBLASLt through XLA")
    if obstacle:
        raise UserError(
            f"FP8 recipe '{recipe.name}' cannot run on backend xla, {obstacle}; use reference"
        )
    return BackendChoice("xla", f"FP8 recipe {recipe.name}: xla, as asked")


def _obstacle(recipe: Recipe, platform: str) -> str | None:
    if platform not in GPU_PLATFORMS:
        return f"since XLA multiplies FP8 numbers on NVIDIA GPUs and this is {platform}"
    if not recipe.per_tensor:
        return "since XLA multiplies no FP8 numbers whose blocks have scales of their own"
    return None
