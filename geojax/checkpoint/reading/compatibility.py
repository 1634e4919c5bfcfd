"""Checks that a checkpoint is of this model and holds its arrays."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic

from geojax.errors import UserError
from geojax.models.own.settings import settings_class
from geojax.named_arrays import describe_arrays


def refuse_earlier_version(path: Path, saved: Mapping[str, Any] | None) -> None:
    """Check that the checkpoint's metadata tell the settings and the position in the data.

    Raises:
        UserError: they do not, as in an earlier version of geojax.
    """
    if saved is not None and not {"config", "consumed_sequences"} <= saved.keys():
        raise UserError(
            f"{path}: an earlier version of geojax wrote this checkpoint, without its settings "
            "and its position in the data. Resume it with that version, or start in another run "
            "directory"
        )


def refuse_other_model(path: Path, saved: Any, given: Mapping[str, Any]) -> None:
    """Compare the model config saved in the checkpoint at `path` with the one `given`.

    Raises:
        UserError: they differ, and the message names the first field that does, and both values.
    """
    difference = _first_difference(
        _with_defaults(with_later_keys(saved or {})), json.loads(json.dumps(dict(given))), "model"
    )
    if difference is not None:
        field, there, here = difference
        raise UserError(
            f"{path}: is a checkpoint of another model: {field} is {there} there and {here} here"
        )


def with_later_keys(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved model config with keys that stood for others when it was saved.

    The norms of latent attention had `rms_norm_eps` before there was a `latent_norm_eps`.
    """
    fields = dict(saved)
    if fields.get("kv_lora_rank") and "latent_norm_eps" not in fields and "rms_norm_eps" in fields:
        fields["latent_norm_eps"] = fields["rms_norm_eps"]
    return fields


def refuse_other_arrays(path: Path, saved: Mapping[str, str], wanted: Mapping[str, Any]) -> None:
    """Compare the arrays saved in the checkpoint at `path` with the ones `wanted`.

    Raises:
        UserError: a name, shape or dtype differs; the message names the first one.
    """
    given = describe_arrays(wanted)
    for name in [*given, *saved]:
        if saved.get(name) != given.get(name):
            there, here = saved.get(name, "absent"), given.get(name, "absent")
            raise UserError(
                f"{path}: the array {name} is {there} in the checkpoint and {here} in this run: "
                "the model, the optimizer or the precision differs"
            )


def _with_defaults(saved: dict[str, Any]) -> dict[str, Any]:
    """Add the keys that models have now to a config that was saved without them."""
    try:
        return settings_class(saved)(**saved).model_dump(mode="json")
    except pydantic.ValidationError:
        return saved


def _first_difference(saved: Any, given: Any, field: str) -> tuple[str, str, str] | None:
    """Return the path of the first field in which two JSON documents differ, and both values."""
    if isinstance(saved, dict) and isinstance(given, dict):
        for key in [*given, *(key for key in saved if key not in given)]:
            if key not in saved or key not in given:
                there = json.dumps(saved[key]) if key in saved else "absent"
                here = json.dumps(given[key]) if key in given else "absent"
                return f"{field}.{key}", there, here
            if (below := _first_difference(saved[key], given[key], f"{field}.{key}")) is not None:
                return below
        return None
    return None if saved == given else (field, json.dumps(saved), json.dumps(given))
