"""Export of a run: its newest checkpoint as a Hugging Face checkpoint with its tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path

from geojax.checkpoint.merged_model import MergedModel
from geojax.data import Tokenizer
from geojax.data.atomic_folder import atomic_folder
from geojax.errors import UserError
from geojax.models import ModelConfig
from geojax.models.huggingface import CheckpointWriter, family_for, write_adapter
from geojax.train.saved_run import SavedDtype, SavedRun


def export_run(
    run: Path,
    output: Path,
    *,
    step: int | None = None,
    dtype: SavedDtype | None = None,
    tokenizer: Path | None = None,
    adapter: bool = False,
    log: Callable[[str], None] = print,
) -> None:
    """Write the weights of a run as safetensors files that transformers loads.

    Adapters are merged into the weights that they adapt: both are added in at least float32, and
    the sum is rounded once.

    Args:
        run: directory of the run, or of one of its islands.
        output: folder to make.
        step: step of the checkpoint; None: the newest.
        dtype: dtype of the weights; None: the one that the run computes in, and of an adapter the
            one that it was trained in.
        tokenizer: a tokenizer.json; None: that of the run's data.
        adapter: write the adapter alone, as peft does.
        log: shows a line to the user.

    Raises:
        UserError: the checkpoint is not whole, its model is of no family of transformers or has no
            adapter to write, the tokenizer or what the run adapts is not there, or `output` is
            taken.
    """
    source = SavedRun.open(run, step=step, tokenizer=tokenizer, log=log)
    saved, model, words = source.weights, source.model.base, source.tokenizer
    family = family_for(model)
    written = dtype or source.compute_dtype
    whole = source.whole_model
    if adapter and not isinstance(whole, MergedModel):
        raise UserError(
            f"geojax export: --adapter requires a run with adapters (model.lora); {run} has none"
        )
    with atomic_folder(output, wait=False) as folder:
        assert folder is not None, "a folder that is taken is refused"
        log(f"checking the files of step {saved.step} in {saved.checkpoints}")
        saved.verify()
        if adapter:
            assert isinstance(whole, MergedModel), "a run without adapters is refused"
            _write_adapter(folder, whole, dtype)
            _write_tokenizer(folder, words, model)
            log(f"{output}: the adapter of step {saved.step}, for {whole.base.folder}")
            return
        token_ids = {"bos_token_id": words.bos_id, "eos_token_id": words.eos_id}
        with CheckpointWriter(folder, model, dtype=written, token_ids=token_ids) as writer:
            for number, leaf in enumerate(writer.leaves, 1):
                log(f"writing {leaf}, {number} of {len(writer.leaves)}")
                for indices, values in whole.blocks(leaf):
                    writer.put(leaf, indices, values)
        _write_tokenizer(folder, words, model)
    log(f"{output}: step {saved.step} as {family.architecture} in {written}")


def _write_adapter(folder: Path, merged: MergedModel, dtype: SavedDtype | None) -> None:
    adapters = merged.adapters
    trained_in = next(iter(adapters.values())).dtype.name
    write_adapter(
        folder,
        merged.base.family,
        merged.model,
        adapters,
        dtype=dtype or trained_in,
        base=merged.base.folder.absolute(),
    )


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, model: ModelConfig) -> None:
    """Write the files that `AutoTokenizer` reads."""
    tokenizer.save(folder / "tokenizer.json")
    special = {"bos_token": tokenizer.beginning, "eos_token": tokenizer.end}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    for name, content in (
        ("tokenizer_config.json", settings),
        ("special_tokens_map.json", special),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
