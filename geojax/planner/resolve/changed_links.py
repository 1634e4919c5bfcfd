"""The choices of a run whose links are not as its topology says: another compression."""

from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.layout_names import WireName
from geojax.planner.resolve.run_prediction import predict_run
from geojax.topology import Topology

_COMPRESSIONS: tuple[WireName, ...] = ("none", "bf16", "int8")
_WORTH = 0.03
"""Share of a step that more compression must save."""


def planned_for(config: RunConfig, topology: Topology) -> RunConfig:
    """Return a run's config for the links of `topology`, with the compression that suits them."""
    adapt = config.adapt.model_copy(update={"links": topology.links})
    config = config.model_copy(update={"adapt": adapt})
    if not adapt.compression or config.dc.role == "stage" or config.zero.across_sites:
        return config
    given = config.communication.gradient_compression
    candidates = [
        config.model_copy(
            update={
                "communication": config.communication.model_copy(
                    update={"gradient_compression": name}
                )
            }
        )
        for name in _COMPRESSIONS[_COMPRESSIONS.index(given) :]
        if name != "int8" or not config.model.use_router_bias  # RunConfig refuses the two together
    ]
    try:
        seconds = [predict_run(candidate, topology).step_seconds for candidate in candidates]
    except UserError:  # a peak is not known
        return config
    most = (1 + _WORTH) * min(seconds)
    return next(
        candidate for candidate, each in zip(candidates, seconds, strict=True) if each <= most
    )
