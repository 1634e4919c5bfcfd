"""Export of a run: its newest checkpoint as a Hugging Face checkpoint with its tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path

from geojax.data import Tokenizer
from geojax.data.atomic_folder import atomic_folder
from geojax.models import ModelConfig
from geojax.models.huggingface import CheckpointWriter, family_for
from geojax.train.saved_run import SavedDtype, SavedRun


def export_run(
    run: Path,
    output: Path,
    *,
    step: int | None = None,
    dtype: SavedDtype | None = None,
    tokenizer: Path | None = None,
    log: Callable[[str], None] = print,
) -> None:
    """Write the weights of a run as safetensors files that transformers loads.

    Args:
        run: directory of the run, or of one of its islands.
        output: folder to make.
        step: step of the checkpoint; None: the newest.
        dtype: dtype of the weights; None: the one that the run computes in.
        tokenizer: a tokenizer.json; None: that of the run's data.
        log: shows a line to the user.

    Raises:
        UserError: the checkpoint is not whole, its model is of no family of transformers, the
            tokenizer is not there, or `output` is taken.
    """
    source = SavedRun.open(run, step=step, tokenizer=tokenizer, log=log)
    saved, model, words = source.weights, source.model, source.tokenizer
    family = family_for(model)
    written = dtype or source.compute_dtype
    with atomic_folder(output, wait=False) as folder:
        assert folder is not None, "a folder that is taken is refused"
        log(f"checking the files of step {saved.step} in {saved.checkpoints}")
        saved.verify()
        token_ids = {"bos_token_id": words.bos_id, "eos_token_id": words.eos_id}
        with CheckpointWriter(folder, model, dtype=written, token_ids=token_ids) as writer:
            for number, leaf in enumerate(writer.leaves, 1):
                log(f"writing {leaf}, {number} of {len(writer.leaves)}")
                for indices, values in saved.blocks(f"{saved.weights}.{leaf}"):
                    writer.put(leaf, indices, values)
        _write_tokenizer(folder, words, model)
    log(f"{output}: step {saved.step} as {family.architecture} in {written}")


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
