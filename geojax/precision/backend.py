"""Choice of the backend that runs FP8 matmuls."""

from typing import Literal, NamedTuple

from geojax.errors import UserError
from geojax.mesh import GPU_PLATFORMS
from geojax.precision import transformer_engine
from geojax.precision.linear_matmul import Backend
from geojax.precision.recipes import Recipe

BackendName = Literal["auto", "reference", "xla", "transformer_engine"]
"""Names of FP8 backends in a config. auto: transformer_engine where it can run, else xla where it
can, else reference. Others: see `geojax.precision.Backend`."""


class BackendChoice(NamedTuple):
    """A backend and the reason for its choice, in one line."""

    name: Backend
    reason: str


def chosen_backend(recipe: Recipe, platform: str, asked: BackendName = "auto") -> BackendChoice:
    """Choose the backend for a program that is compiled for `platform`.

    Raises:
        UserError: the requested backend cannot run; the message says what is missing.
    """
    if asked != "auto":
        reason = None if asked == "reference" else _unsupported_reason(recipe, platform, asked)
        if reason:
            use = "reference" if _unsupported_reason(recipe, platform, "xla") else "xla"
            raise UserError(
                f"FP8 recipe '{recipe.name}' cannot run on backend {asked}, since {reason}; "
                f"use {use}"
            )
        return BackendChoice(asked, f"FP8 recipe {recipe.name}: {asked}, as asked")
    in_xla = _unsupported_reason(recipe, platform, "xla")
    if in_xla:  # which rules out TransformerEngine, too
        return BackendChoice("reference", f"FP8 recipe {recipe.name}: reference, since {in_xla}")
    in_engine = _unsupported_reason(recipe, platform, "transformer_engine")
    if in_engine:
        reason = f"matmuls of cuBLASLt through XLA, since {in_engine}"
        return BackendChoice("xla", f"FP8 recipe {recipe.name}: {reason}")
    reason = "TransformerEngine's kernels and matmuls"
    return BackendChoice("transformer_engine", f"FP8 recipe {recipe.name}: {reason}")


def _unsupported_reason(recipe: Recipe, platform: str, backend: Backend) -> str | None:
    who = "XLA" if backend == "xla" else "TransformerEngine"
    if platform not in GPU_PLATFORMS:
        return f"{who} multiplies FP8 numbers on NVIDIA GPUs and this is {platform}"
    if not recipe.per_tensor:
        return f"{who} multiplies no FP8 numbers whose blocks have scales of their own"
    return transformer_engine.unsupported_reason() if backend == "transformer_engine" else None
