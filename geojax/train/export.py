"""Export of a run: its newest checkpoint as a Hugging Face checkpoint with its tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from geojax.checkpoint.saved_model import SavedModel
from geojax.data import Corpus, DataSettings, Tokenizer
from geojax.data.atomic_folder import atomic_folder
from geojax.errors import UserError
from geojax.models import ModelConfig
from geojax.models.huggingface import CheckpointWriter, family_for
from geojax.precision import policy
from geojax.settings import validate
from geojax.train.resume import refuse_earlier_version

ExportDtype = Literal["bfloat16", "float16", "float32", "float64"]


def export_run(
    run: Path,
    output: Path,
    *,
    step: int | None = None,
    dtype: ExportDtype | None = None,
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
    saved = SavedModel.open(run, step)
    refuse_earlier_version(saved.checkpoints / str(saved.step), saved.metadata)
    config = saved.metadata["config"]
    model = validate(ModelConfig, saved.metadata["model"], f"{saved.checkpoints}: model")
    family = family_for(model)
    words = _tokenizer(config["data"], tokenizer)
    if words.vocabulary_size > model.vocab_size:
        raise UserError(
            f"{tokenizer or 'the data'}: the tokenizer has {words.vocabulary_size} tokens, and the "
            f"model {model.vocab_size}"
        )
    written = dtype or policy(config["precision"]).compute_dtype.name
    with atomic_folder(output, wait=False) as folder:
        assert folder is not None, "a folder that is taken is refused"
        log(f"checking the files of step {saved.step} in {saved.checkpoints}")
        saved.verify()
        token_ids = {"bos_token_id": words.bos_id, "eos_token_id": words.eos_id}
        with CheckpointWriter(folder, model, dtype=written, token_ids=token_ids) as writer:
            for number, leaf in enumerate(writer.leaves, 1):
                log(f"writing {leaf}, {number} of {len(writer.leaves)}")
                for indices, values in saved.blocks(f"parameters.{leaf}"):
                    writer.put(leaf, indices, values)
        _write_tokenizer(folder, words, model)
    log(f"{output}: step {saved.step} as {family.architecture} in {written}")


def _tokenizer(data: object, given: Path | None) -> Tokenizer:
    if given is not None:
        return Tokenizer.load(given)
    assert isinstance(data, dict), "a run's settings are a mapping"
    try:
        return Corpus.open(validate(DataSettings, data, "data")).tokenizer
    except UserError as error:
        raise UserError(f"{error}; or name the run's tokenizer.json with --tokenizer") from None


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
