"""Measured times of the pieces of a model on one pipeline stage: what `geojax probe` writes and
`geojax plan --stage-times` computes with, instead of operations and peaks.

    sequences: 1
    sequence_length: 4096
    ...
    sites:
      - name: east
        layer: {forward: 3.1ms, backward: 3.3ms, weight: 2.9ms}
        layer_whole_backward: 5.9ms
        embedding: {forward: 80us, backward: 0s, weight: 190us}
        head: {forward: 4.2ms, backward: 4.1ms, weight: 4.2ms}
      - name: west
        ...
"""

from pathlib import Path
from typing import Any

import pydantic
import yaml

from geojax.errors import UserError
from geojax.models import AnyModel
from geojax.models.chunk.remat import Remat
from geojax.models.parallel.parallelism import Parallelism
from geojax.quantities import Count, Length, Seconds
from geojax.settings import Settings, load_settings


class PieceTimes(Settings):
    """One piece, for one microbatch, in seconds."""

    forward: Seconds
    backward: Seconds
    """The gradient of the input, with what it computes again."""
    weight: Seconds
    """The gradient of the weights. A backward that is not split takes both."""

    @property
    def kinds(self) -> tuple[float, float, float]:
        """Forward, backward, weight."""
        return self.forward, self.backward, self.weight


class SiteTimes(Settings):
    """The pieces on the accelerators of one site."""

    name: str
    """The name of the site."""
    layer: PieceTimes
    """One layer of the model, its backward in two halves."""
    layer_whole_backward: Seconds | None = None
    """A layer's backward that is not split; null: as long as its halves together."""
    embedding: PieceTimes
    """The work of the first stage besides its layers."""
    head: PieceTimes
    """The work of the last stage besides its layers: norm, head, loss."""

    @property
    def split_surcharge(self) -> float:
        """The share by which the halves of a layer's backward take longer than the whole."""
        if not self.layer_whole_backward:
            return 0.0
        halves = self.layer.backward + self.layer.weight
        return max(0.0, halves / self.layer_whole_backward - 1)

    @property
    def with_whole_backward(self) -> "SiteTimes":
        """The same with halves of a layer's backward that together last as long as the whole."""
        share = 1 / (1 + self.split_surcharge)
        halves = {"backward": share * self.layer.backward, "weight": share * self.layer.weight}
        return self.model_copy(update={"layer": self.layer.model_copy(update=halves)})


class StageTimes(Settings):
    """Measured times, and the model and microbatches that they are of."""

    model: AnyModel
    """The model; of how many layers does not matter."""
    sequences: Count
    """Sequences of a microbatch on one data-parallel rank."""
    sequence_length: Length
    """Tokens of a sequence."""
    dtype: str
    """The dtype of activations and matrix products."""
    remat: Remat
    parallelism: Parallelism
    """The parallelism of a stage's layers and sequences over its devices."""
    sites: tuple[SiteTimes, ...] = pydantic.Field(min_length=1)
    """The times of each site; a single one stands for all."""

    @classmethod
    def load(cls, path: Path) -> "StageTimes":
        """Read the times in a YAML file.

        Raises:
            UserError: there is none, or a mistake in it, in one line.
        """
        return load_settings(cls, path)

    def save(self, path: Path) -> None:
        """Write them as YAML.

        Raises:
            UserError: the file cannot be written.
        """
        content = self.model_dump(mode="json", exclude={"model"})
        content["model"] = self.model.model_dump(mode="json", exclude_none=True)
        try:
            path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror})") from None

    def of_site(self, name: str) -> SiteTimes:
        """Return the times of the site called `name`.

        Raises:
            UserError: several sites were measured, and not this one.
        """
        by_name = {site.name: site for site in self.sites}
        if name not in by_name and len(self.sites) > 1:
            raise UserError(f"stage times were measured in {', '.join(by_name)}, not in '{name}'")
        return by_name.get(name, self.sites[0])

    def require(self, **wanted: Any) -> None:
        """Refuse unless they were measured for these fields.

        Raises:
            UserError: one of them differs; with the command that measures again.
        """
        for name, value in wanted.items():
            own = getattr(self, name)
            if name == "model":
                own, value = (each.with_stacked_layers(1) for each in (own, value))
            if own != value:
                measured = "another model" if name == "model" else f"{name}={own}, not {value}"
                raise UserError(
                    f"the stage times were measured for {measured}; geojax probe CONFIG "
                    "--stage-times FILE measures those of a config"
                )
