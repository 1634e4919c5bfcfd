"""Collectives over `tensor` beside products: what of a layer's travels unseen.

With sequence parallelism and on GPUs the program orders them. A layer in two parts, time to the
right; what has no product below it waits:

    collectives   G1 G2 . S1 S2 G1 G2 S1 S2        G gathers and S scatters a part
    products         q1 q2 a o1 o2 .  f1 f2        queries, attention, output, feed-forward

Around attention the first gathers wait in any number of parts, since its products are short. The
backward does the same in the other direction, and its last scatters travel beside the gradients of
weights. Where what enters is gathered once more for these (`selective`), that is beside the
products before them, and in one part the gather of the attention's output gradient beside them.

Where a stage's forward and backward of one tick are one branch (`has_joint_ticks`), all travels
beside the products of the other pass, but for the first gather of the tick. A test holds these
shares to programs compiled for GPUs.
"""

from typing import NamedTuple

from geojax.models import ModelConfig
from geojax.planner.cost.layer import REGIONS, LayerTimes
from geojax.planner.cost.networks import RankNetwork
from geojax.precision import policy
from geojax.runtime.platform import GPU, platform_of_accelerator


class Beside(NamedTuple):
    """Seconds of a layer's collectives over `tensor` that travel beside products."""

    forward: float = 0.0
    backward: float = 0.0


def beside_products(times: LayerTimes, network: RankNetwork, message: float) -> Beside:
    """Time what travels beside the products of one layer.

    Args:
        times: the layer.
        network: of the ranks of `tensor`.
        message: bytes of a gather or a scatter of all positions.
    """
    if not orders_collectives(times):
        return Beside()
    chunks, weights = times.chunks, _weight_gradients(times)
    whole, part = network.seconds(message, 1), network.seconds(message / chunks, 1)
    last_scatters = sum(min(part, weights.get(entry, 0.0)) for entry in REGIONS[::2])
    more = chunks - 1
    seconds = {
        region: sum(times.seconds(each) for each in times.products() if each.part == region)
        for region in REGIONS
    }
    queries, output, up, down = (each / chunks for each in seconds.values())
    # All positions are gathered once more for the gradients of a region's first weights.
    gathers_again = times.layout.remat == "selective" and bool(weights)
    if chunks == 1:
        beside = [seconds[region] for region in REGIONS[1::2] if region in weights]
        beside.append(weights.get(REGIONS[-1], 0.0))  # the attention's output gradient is gathered
        again = sum(min(whole, own) for own in beside) if gathers_again else 0.0
        return Beside(backward=again + last_scatters)
    again = min(whole, more * (up + down)) if gathers_again else 0.0
    return Beside(
        min(part, queries) + more * (min(part, output) + min(2 * part, up + down)),
        min(part, output)
        + more * (min(part, up + down) + min(part, queries))
        + (again + last_scatters),
    )


def late_seconds(times: LayerTimes) -> float:
    """Time the gradients of weights that a joint tick ends with, beside its hops.

    They are of the products that a layer begins with, as one of each weight: not in parts, and not
    in FP8 (`geojax.pipeline.execution.late_products`).
    """
    recipe = policy(times.layout.precision).recipe
    plain = isinstance(times.model, ModelConfig) and not times.model.has_latent_attention
    in_one = plain and times.chunks == 1 and recipe is None
    return _weight_gradients(times).get(REGIONS[0], 0.0) if in_one and joint_share(times) else 0.0


def joint_share(times: LayerTimes) -> float:
    """Return the share of the passes of a layer that are in a tick with one of the other kind.

    Before the first backward, and after the last forward, a pipeline of p stages and m microbatches
    has ticks of one kind: p / m of either.
    """
    if not times.has_joint_ticks:
        return 0.0
    return max(0.0, 1 - times.layout.pipeline_stages / times.layout.batch.microbatches)


def orders_collectives(times: LayerTimes) -> bool:
    """Return True if the program orders the collectives over `tensor` of its layers itself."""
    return (
        times.execution.gradients_last
        and times.layout.model_parallelism.sequence
        and platform_of_accelerator(times.site.accelerator) is GPU
    )


def _weight_gradients(times: LayerTimes) -> dict[str, float]:
    """Time the gradients of each region's weights, by its name, where they come next.

    They do not if the weights are frozen, or if a schedule leaves their gradients for later; and
    experts have messages of their own.
    """
    layout = times.layout
    if layout.splits_backward or times.frozen:
        return {}
    regions = REGIONS[:2] if times.model.is_moe else REGIONS
    return {
        region: sum(
            times.gradient_seconds(each) for each in times.products() if each.part == region
        )
        for region in regions
    }
