"""The weights of a model in a folder: of a Hugging Face checkpoint, or of an exported model."""

from pathlib import Path

from geojax.checkpoint.reading.initial_weights import InitialWeights
from geojax.models import AnyModel, OwnModel
from geojax.models.huggingface.checkpoint import HuggingFaceWeights
from geojax.models.own.weights import OwnWeights


def open_weights(folder: Path, model: AnyModel) -> InitialWeights:
    """Open the weights of `model` in `folder`; none is read.

    Raises:
        UserError: they are not there, or not of the model.
    """
    if isinstance(model, OwnModel):
        return OwnWeights(folder, model)
    return HuggingFaceWeights(folder, model)
