"""A run as its checkpoints tell it: the model, the settings, the tokenizer and the weights."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jax.sharding import Mesh

from geojax.checkpoint.reading.base_weights import BASE_WEIGHTS, refuse_other_base
from geojax.checkpoint.reading.compatibility import refuse_earlier_version, with_later_keys
from geojax.checkpoint.reading.merged_model import MergedModel
from geojax.checkpoint.reading.saved_model import SavedModel
from geojax.checkpoint.reading.weights_of_folder import open_weights
from geojax.data import Corpus, DataSettings, Tokenizer
from geojax.data.preparation.standard_library import open_standard_library
from geojax.data.templates.chat import ChatTemplate
from geojax.data.templates.template_files import distinct_templates, missing_template
from geojax.errors import UserError
from geojax.inference import LoadedModel
from geojax.inference.loaded_model import refuse_mesh
from geojax.job.exit_messages import first_line
from geojax.models import AnyModel
from geojax.models.own.settings import settings_class
from geojax.paths import resolved_path
from geojax.precision import policy
from geojax.settings import validate

SavedDtype = Literal["bfloat16", "float16", "float32", "float64"]
"""A dtype that a run's weights are taken in."""


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """A checkpoint of a run, which may be running: nothing is locked or written."""

    weights: SavedModel
    """The checkpoint."""
    config: Mapping[str, Any]
    """The run's resolved config."""
    model: AnyModel
    tokenizer: Tokenizer
    tokenizer_files: Sequence[Path]
    """The tokenizer.json of each source of the run's data, or the given file or folder."""

    @classmethod
    def open(
        cls,
        run: Path,
        *,
        step: int | None = None,
        tokenizer: Path | None = None,
        log: Callable[[str], None] = print,
    ) -> "SavedRun":
        """Open the newest checkpoint of a run that is whole.

        Args:
            run: directory of the run, or of one of its islands.
            step: step of the checkpoint; None: the newest.
            tokenizer: a tokenizer's file or folder; None: that of the run's data.
            log: shows a line to the user.

        Raises:
            UserError: there is none, or the tokenizer is not there or has more tokens than the
                model.
        """
        saved = SavedModel.open(run, step, log)
        refuse_earlier_version(saved.checkpoints / str(saved.step), saved.metadata)
        config = saved.metadata["config"]
        settings = with_later_keys(saved.metadata["model"])
        model = validate(settings_class(settings), settings, f"{saved.checkpoints}: model")
        words, files = _tokenizer(config["data"], tokenizer)
        if words.vocabulary_size > model.vocab_size:
            raise UserError(
                f"{tokenizer or 'the data'}: the tokenizer has {words.vocabulary_size} tokens, and "
                f"the model {model.vocab_size}"
            )
        return cls(saved, config, model, words, files)

    @functools.cached_property
    def whole_model(self) -> SavedModel | MergedModel:
        """The weights of `model.base`: those of the checkpoint, or its adapters merged into theirs.

        Raises:
            UserError: the weights that the run adapts are not where it read them, or others.
        """
        if self.model.lora is None:
            return self.weights
        folder = resolved_path(self.config["initial_weights"])
        base = open_weights(folder, self.model.base)
        refuse_other_base(folder, self.weights.metadata[BASE_WEIGHTS], base.digest())
        return MergedModel(self.weights, base, self.model)

    def chat_template(self) -> ChatTemplate:
        """Read the chat template that the run's data were prepared with.

        Raises:
            UserError: they have none, or different ones, or it cannot be read.
        """
        templates = distinct_templates(self.tokenizer_files)
        instead = "name a model's folder with one (--tokenizer)"
        if not templates:
            raise UserError(f"{missing_template(self.tokenizer_files[0])}; {instead}")
        if len(templates) > 1:
            names = f"{templates[0].name} and {templates[1].name}"
            raise UserError(f"the run's data have different chat templates, {names}; {instead}")
        return ChatTemplate(templates[0])

    @property
    def compute_dtype(self) -> str:
        """Name of the dtype that the run computes in."""
        return policy(self.config["precision"]).compute_dtype.name


def _tokenizer(data: Mapping[str, Any], given: Path | None) -> tuple[Tokenizer, list[Path]]:
    if given is not None:
        return Tokenizer.load(given), [given]
    try:
        corpus = Corpus.open(validate(DataSettings, data, "data"), open_standard_library)
        files = [source.text.tokenizer_file for source in corpus.sources]
        return corpus.tokenizer, files
    except UserError as error:
        raise UserError(f"{error}; or name the run's tokenizer with --tokenizer") from None


class Serving(NamedTuple):
    """A run's checkpoint that has been read onto devices."""

    run: SavedRun
    model: LoadedModel


def serve_run(
    run: Path,
    mesh: Mesh,
    *,
    step: int | None = None,
    tokenizer: Path | None = None,
    dtype: SavedDtype | None = None,
    check: Callable[[SavedRun], object] = lambda run: None,
    log: Callable[[str], None] = print,
) -> Serving:
    """Read the newest checkpoint of a run onto `mesh`, also while the run goes on.

    Arguments and errors are those of `SavedRun.open`, and besides:

    Args:
        mesh: from `serving_mesh`.
        dtype: dtype of the weights; None: the one that the run computes in.
        check: refuses what the run cannot do, before its weights are read.

    Raises:
        UserError: the mesh cannot share the model, or the checkpoint is damaged. (Checksums are not
            compared: that would read the optimizer's state too.)
    """
    while True:
        saved = SavedRun.open(run, step=step, tokenizer=tokenizer, log=log)
        check(saved)
        refuse_mesh(saved.model.base, mesh)
        weights = saved.weights
        log(f"reading step {weights.step} in {weights.checkpoints}")
        problem = None
        try:
            name = dtype or saved.compute_dtype
            model = LoadedModel.load(saved.whole_model, saved.model.base, mesh, name)
        except UserError:
            raise
        except (OSError, ValueError) as error:
            problem = first_line(error)
        if step is None and weights.is_removed:  # perhaps while its last files were read
            log(f"step {weights.step} has been removed meanwhile")
            continue
        if problem is not None:
            where = f"{weights.checkpoints}: step {weights.step}"
            raise UserError(f"{where} is damaged: {problem}")
        return Serving(saved, model)
