"""The JSON schema of a run's config, for editors."""

from typing import Any

from geojax.config.run_config import RunConfig


def config_schema() -> dict[str, Any]:
    """Return the schema of a config file: the settings, and `base`, which a file may have."""
    schema = RunConfig.model_json_schema()
    base = {"type": "string", "description": "YAML file, relative to this one, that it changes."}
    # What a base holds is known when the files are read.
    schema.pop("required", None)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Config of a run of geojax",
        "properties": {"base": base, **schema["properties"]},
    }
