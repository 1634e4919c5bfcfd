"""Models with adapters, whose step no formula of the plan describes."""

from geojax.errors import UserError
from geojax.models import AnyModel


def refuse_adapters(model: AnyModel) -> None:
    """Refuse a model with adapters: formulas take all weights for trained ones.

    Raises:
        UserError: `model` has adapters.
    """
    if model.lora is not None:
        raise UserError(
            "model.lora: a plan by formula knows no adapters; it works without model.lora"
        )
