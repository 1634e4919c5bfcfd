"""`geojax export RUN --output DIR`: a run's weights for transformers and vLLM."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclasses.dataclass(frozen=True)
class ExportCommand:
    """Write the newest checkpoint of RUN as a Hugging Face checkpoint.

    The folder then holds safetensors files with their index, config.json, generation_config.json
    and the tokenizer. No device is needed, but the folders of all sites must lie in RUN. Adapters
    (model.lora) are merged into the weights that they adapt, which must still be where the run read
    them.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Directory of the run."""

    output: Path
    """Folder to make."""

    step: int | None = None
    """Step of the checkpoint; default: the newest."""

    dtype: Literal["bfloat16", "float16", "float32", "float64"] | None = None
    """Dtype of the weights. Default: the dtype that the run computes in; with --adapter, the dtype
    of the trained adapter."""

    tokenizer: Path | None = None
    """Tokenizer's file, or a model's folder; default: the tokenizer of the run's data."""

    adapter: bool = False
    """Write only the adapter, as peft does: adapter_config.json, adapter_model.safetensors and the
    tokenizer."""


def run(command: ExportCommand) -> int:
    """Export, and return the exit code 0."""
    # Imported here, so that `geojax --help` need not wait for JAX.
    from geojax.saved_runs.export import export_run

    export_run(
        command.run,
        command.output,
        step=command.step,
        dtype=command.dtype,
        tokenizer=command.tokenizer,
        adapter=command.adapter,
    )
    return 0
