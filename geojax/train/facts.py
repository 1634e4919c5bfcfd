"""Facts about the steps of a run, for its log."""

import dataclasses

import jax

from geojax.accelerators import accelerator_of
from geojax.config.run_config import RunConfig
from geojax.step.plan import StepPlan


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """Facts about steps of a run whose batches have one size."""

    tokens_per_step: int
    """Tokens of a global batch, padding included."""

    devices: int
    """Devices of all sites."""

    flops_per_token: float | None
    """Model FLOPs of forward and backward; recomputation does not count. None: not counted."""

    peak_flops: float | None = None
    """FLOP/s of all devices together in the compute dtype; None where they are not known."""

    cross_site_bytes: float | None = None
    """Bytes that all devices of a site send to other sites in a step; None with one site."""

    def of_batch(self, tokens: int, sent_bytes: float | None) -> "RunFacts":
        """Return the facts of a step of so many tokens, in which a site sends `sent_bytes`."""
        return dataclasses.replace(self, tokens_per_step=tokens, cross_site_bytes=sent_bytes)

    def model_flops_utilization(self, tokens_per_second: float) -> float | None:
        """Return the share of the peak that goes into the model; None where one is not known."""
        if not self.peak_flops or self.flops_per_token is None:
            return None
        return self.flops_per_token * tokens_per_second / self.peak_flops


def run_facts(
    config: RunConfig,
    plan: StepPlan,
    flops_per_token: float | None,
    sent_bytes: float | None,
    sequences: int,
) -> RunFacts:
    """Return the facts of a run whose step has a `plan` on the mesh of one or of all sites.

    Args:
        config: the run.
        plan: its step.
        flops_per_token: the model's; None: an earlier version resolved the step.
        sent_bytes: bytes that a site sends to others in a step; None with one site.
        sequences: those of a step's batch, which later steps may have more of.
    """
    mesh, sequence = plan.mesh, config.batch.sequence_length
    accelerator = accelerator_of(mesh.devices.flat[0])
    peak = accelerator and accelerator.peak(plan.policy.compute_dtype.name)
    devices = mesh.devices.size // mesh.shape["dc"] * config.mesh.dc
    return RunFacts(
        tokens_per_step=sequences * sequence,
        devices=devices,
        flops_per_token=flops_per_token,
        peak_flops=peak * devices if peak else None,
        cross_site_bytes=sent_bytes,
    )


def peak_memory() -> dict[str, float]:
    """Return the most bytes that this process's first device held, and those that it has.

    Nothing where the backend does not count them, as on CPUs. The devices are not waited for.
    """
    statistics = jax.local_devices()[0].memory_stats() or {}
    keys = {"memory/peak_bytes": "peak_bytes_in_use", "memory/limit_bytes": "bytes_limit"}
    return {name: float(statistics[key]) for name, key in keys.items() if key in statistics}
