"""The settings by which a run is held to its plan and follows a link that changes."""

import pydantic

from geojax.quantities import StepCount
from geojax.settings import Settings
from geojax.topology import SiteLink


class AdaptSettings(Settings):
    """Comparison of measured steps with the plan, where a topology describes several sites."""

    interval: StepCount = 50
    """Steps of a window, over which steps and links are compared with the plan. The log names a
    term that deviates: a link, a late site, slower compute."""

    replan: bool = False
    """After three windows in a row with a changed link, plan again at the next checkpoint and
    compile the new step. "auto" settings (buckets, hop ticks) and the order of a schedule may
    change; the layout never does. false: only log."""

    compression: bool = False
    """With `replan`: allow stronger compression than `communication.gradient_compression` where
    that makes the step faster. Compression rounds gradients."""

    links: tuple[SiteLink, ...] = ()
    """Links between sites that replace the topology's. A run that planned again logs them."""

    @pydantic.model_validator(mode="after")
    def _compression_needs_a_plan(self) -> "AdaptSettings":
        if self.compression and not self.replan:
            raise ValueError("compression requires replan=true; got false. Remove compression")
        return self
