"""Options of the commands that put a run's checkpoint to work, and what they make of them."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from geojax.errors import UserError

if TYPE_CHECKING:
    from geojax.saved_runs.saved_run import SavedRun, Serving


@dataclasses.dataclass(frozen=True)
class ServingMesh:
    """Sizes of the mesh axes that share a model and its sequences."""

    data: int = 1
    """Groups of devices that share the sequences."""

    expert: int = 1
    """Devices that share the experts."""

    tensor: int = 1
    """Devices that share every layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """The run, its checkpoint, and the devices."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Directory of the run."""

    step: int | None = None
    """Step of the checkpoint; default: the newest complete one."""

    dtype: Literal["bfloat16", "float16", "float32", "float64"] | None = None
    """Dtype of the weights; default: the dtype that the run computes in."""

    tokenizer: Path | None = None
    """Tokenizer's file, or a model's folder; default: the tokenizer of the run's data."""

    batch_size: int = 16
    """Sequences that are computed together."""

    mesh: ServingMesh = ServingMesh()
    """Devices that share the model; default: one."""

    def note(self, line: str) -> None:
        """Show a line to the user, on stderr."""
        print(line, file=sys.stderr, flush=True)

    def serve(self, check: Callable[["SavedRun"], object]) -> "Serving":
        """Read the checkpoint onto the devices.

        Args:
            check: refuses what the run cannot do, before its weights are read.

        Raises:
            UserError: there is no checkpoint that is whole, or the devices cannot share the model.
        """
        if self.batch_size < 1:
            raise UserError(f"--batch-size is {self.batch_size}; at least 1 would be right")
        import jax

        from geojax import runtime
        from geojax.cache import cache_folder
        from geojax.inference.loaded_model import serving_mesh
        from geojax.saved_runs.saved_run import serve_run

        runtime.start(runtime.ProcessSettings(process_count=1))
        runtime.enable_compilation_cache(cache_folder() / "xla")
        jax.config.update("jax_enable_x64", self.dtype == "float64")
        return serve_run(
            self.run,
            serving_mesh(**dataclasses.asdict(self.mesh)),
            step=self.step,
            tokenizer=self.tokenizer,
            dtype=self.dtype,
            check=check,
            log=self.note,
        )
