"""The settings by which a run is held to its plan and follows a link that changes."""

import pydantic

from geojax.quantities import StepCount
from geojax.settings import Settings
from geojax.topology import SiteLink


class AdaptSettings(Settings):
    """Comparison of measured steps with the plan, where a topology describes several sites."""

    interval: StepCount = 50
    """Steps of a window, over which steps and links are compared with the plan. A term that
    deviates is logged by its name: a link, a site that is late, slower compute."""

    replan: bool = False
    """At the first checkpoint after three windows in a row in which a link was another: plan for
    the link as it is and compile the step anew. Settings that are "auto" may change (buckets, hop
    ticks), and the order of a schedule; never the layout. false: only log."""

    compression: bool = False
    """With `replan`: gradients may be compressed more than `communication.gradient_compression`
    where that makes the step faster, which rounds them."""

    links: tuple[SiteLink, ...] = ()
    """Links between sites in place of the topology's, as a run that planned anew logs them."""

    @pydantic.model_validator(mode="after")
    def _compression_needs_a_plan(self) -> "AdaptSettings":
        if self.compression and not self.replan:
            raise ValueError("compression requires replan=true; got false. Remove compression")
        return self
