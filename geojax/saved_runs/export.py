"""Export of a run: its newest checkpoint as a Hugging Face checkpoint with its tokenizer."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from geojax.checkpoint.reading.merged_model import MergedModel
from geojax.data import Tokenizer
from geojax.data.preparation.atomic_folder import atomic_folder, refuse_taken
from geojax.data.templates.template_files import (
    TEMPLATE_FILE,
    TOKENIZER_CONFIG,
    TemplateText,
    distinct_templates,
)
from geojax.errors import UserError
from geojax.models import AnyModel, ModelConfig, OwnModel
from geojax.models.huggingface.adapter import write_adapter
from geojax.models.huggingface.checkpoint import HuggingFaceWeights, family_for
from geojax.models.huggingface.write import CheckpointWriter
from geojax.saved_runs.own_export import write_own_model
from geojax.saved_runs.saved_run import SavedDtype, SavedRun


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
        tokenizer: a tokenizer's file or folder; None: that of the run's data.
        adapter: write the adapter alone, as peft does.
        log: shows a line to the user.

    Raises:
        UserError: the checkpoint is not whole, no family of transformers fits its model, there is
            no adapter to write, the tokenizer or the adapted weights are missing, or `output` is
            taken.
    """
    refuse_taken(output)
    source = SavedRun.open(run, step=step, tokenizer=tokenizer, log=log)
    saved, model = source.weights, source.model.base
    written = dtype or source.compute_dtype
    whole = source.whole_model
    if adapter and not isinstance(whole, MergedModel):
        raise UserError(
            f"geojax export: --adapter requires a run with adapters (model.lora); {run} has none"
        )
    words = ExportedTokenizer.read(source.tokenizer, source.tokenizer_files, log)
    if isinstance(model, OwnModel):
        if adapter:
            raise UserError(
                "geojax export: --adapter writes files of peft, which has no such model; without "
                "it the adapter is merged into the weights"
            )
        with atomic_folder(output, wait=False) as folder:
            assert folder is not None, "a folder that is taken is refused"
            saved.verify()
            write_own_model(folder, model, whole, written, log)
            words.write(folder, model)
        log(
            f"{output}: step {saved.step} in {written}, by the attributes of the Decoder; no "
            "config.json is written, since transformers has no such model"
        )
        return
    family = family_for(model)
    with atomic_folder(output, wait=False) as folder:
        assert folder is not None, "a folder that is taken is refused"
        log(f"checking the files of step {saved.step} in {saved.checkpoints}")
        saved.verify()
        if adapter:
            assert isinstance(whole, MergedModel), "a run without adapters is refused"
            _write_adapter(folder, whole, dtype)
            words.write(folder, model)
            log(f"{output}: the adapter of step {saved.step}, for {whole.base.folder}")
            return
        with CheckpointWriter(folder, model, dtype=written, token_ids=words.token_ids) as writer:
            for number, leaf in enumerate(writer.leaves, 1):
                log(f"writing {leaf}, {number} of {len(writer.leaves)}")
                for indices, values in whole.blocks(leaf):
                    writer.put(leaf, indices, values)
        words.write(folder, model)
    log(f"{output}: step {saved.step} as {family.architecture} in {written}")


def _write_adapter(folder: Path, merged: MergedModel, dtype: SavedDtype | None) -> None:
    assert isinstance(merged.model, ModelConfig), "peft knows families alone"
    assert isinstance(merged.base, HuggingFaceWeights)
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


class ExportedTokenizer(NamedTuple):
    """A run's tokenizer, with the chat template of its data if they have one."""

    words: Tokenizer
    template: TemplateText | None
    """None: the data have none, or different ones."""

    @classmethod
    def read(
        cls, words: Tokenizer, files: Sequence[Path], log: Callable[[str], None] = print
    ) -> "ExportedTokenizer":
        """Read the chat template that lies beside `files`, each a tokenizer's file or folder.

        Raises:
            UserError: a file cannot be read.
        """
        templates = distinct_templates(files)
        if len(templates) > 1:
            log(f"no chat template is written: {templates[0].name} and {templates[1].name} differ")
            return cls(words, None)
        return cls(words, templates[0] if templates else None)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by key of tokenizer_config.json: those that the template may name."""
        if self.template is not None:
            return self.template.special_tokens
        return {"bos_token": self.words.beginning, "eos_token": self.words.end}

    @property
    def token_ids(self) -> dict[str, int | list[int]]:
        """Numbers of special tokens, by key of config.json.

        A text ends with its document or, in a conversation, with `eos_token`.
        """
        end = self.words.eos_id
        of_answer = self.words.id_of(self.special_tokens.get("eos_token", self.words.end))
        ends = end if of_answer in (end, None) else [end, of_answer]
        return {"bos_token_id": self.words.bos_id, "eos_token_id": ends}

    def write(self, folder: Path, model: AnyModel) -> None:
        """Write the files that `AutoTokenizer` reads."""
        self.words.save(folder / "tokenizer.json")
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            **self.special_tokens,
        }
        for name, content in (
            (TOKENIZER_CONFIG, settings),
            ("special_tokens_map.json", self.special_tokens),
        ):
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if self.template is not None:
            (folder / TEMPLATE_FILE).write_text(self.template.source, encoding="utf-8")
