"""Catalog of accelerators: peak rates and memory, as published by their makers.

Peaks are dense (no structured sparsity) and count a multiply-add as two operations. Sources:
NVIDIA's data sheets of A100, H100, H200 and B200 (SXM boards). Huawei publishes no data sheet of
the Ascend 910B; its row holds the figures that are widely reported for the training card.
"""

from typing import Any, Literal

import pydantic

from geojax.errors import UserError
from geojax.quantities import Bytes, BytesPerSecond, FlopsPerSecond
from geojax.settings import Settings
from geojax.suggestions import did_you_mean

Precision = Literal["float64", "float32", "tensorfloat32", "float16", "bfloat16", "float8"]


class Accelerator(Settings):
    """One kind of accelerator; unknown figures are left out, never guessed."""

    name: str
    """Name in topology files, such as h100-sxm."""
    peak_flops_per_second: dict[Precision, FlopsPerSecond] = pydantic.Field(default_factory=dict)
    """Dense matrix-product peak by the precision of the factors; tensorfloat32 is what a GPU
    uses for float32 factors by default, and float32 is without it."""
    memory_bytes: Bytes | None = None
    """Size of the device's own memory."""
    memory_bytes_per_second: BytesPerSecond | None = None
    """Bandwidth of that memory, reads and writes together."""
    device_kinds: tuple[str, ...] = ()
    """JAX's names of such devices (`device.device_kind`)."""

    def peak(self, dtype: str) -> float | None:
        """Return peak FLOP/s for factors of `dtype`, a dtype's name; None if it is unknown.

        Every float8_* counts as float8.
        """
        precision: Any = "float8" if dtype.startswith("float8") else dtype
        return self.peak_flops_per_second.get(precision)


def _kind(
    name: str,
    peaks: dict[str, str],
    memory: str | None = None,
    bandwidth: str | None = None,
    device_kinds: tuple[str, ...] = (),
) -> Accelerator:
    return Accelerator.model_validate(
        {
            "name": name,
            "peak_flops_per_second": peaks,
            "memory_bytes": memory,
            "memory_bytes_per_second": bandwidth,
            "device_kinds": device_kinds,
        }
    )


_A100_PEAKS = {
    "float64": "19.5TFLOP/s",
    "float32": "19.5TFLOP/s",
    "tensorfloat32": "156TFLOP/s",
    "float16": "312TFLOP/s",
    "bfloat16": "312TFLOP/s",
}
_HOPPER_PEAKS = {
    "float64": "67TFLOP/s",
    "float32": "67TFLOP/s",
    "tensorfloat32": "494.5TFLOP/s",
    "float16": "989TFLOP/s",
    "bfloat16": "989TFLOP/s",
    "float8": "1979TFLOP/s",
}
_B200_PEAKS = {
    "float64": "37TFLOP/s",
    "float32": "75TFLOP/s",
    "tensorfloat32": "1.125PFLOP/s",
    "float16": "2.25PFLOP/s",
    "bfloat16": "2.25PFLOP/s",
    "float8": "4.5PFLOP/s",
}

CATALOG: dict[str, Accelerator] = {
    accelerator.name: accelerator
    for accelerator in (
        _kind("simulated", {}, device_kinds=("cpu",)),
        _kind("a100-sxm-40gb", _A100_PEAKS, "40GB", "1555GB/s", ("NVIDIA A100-SXM4-40GB",)),
        _kind("a100-sxm-80gb", _A100_PEAKS, "80GB", "2039GB/s", ("NVIDIA A100-SXM4-80GB",)),
        _kind("h100-sxm", _HOPPER_PEAKS, "80GB", "3.35TB/s", ("NVIDIA H100 80GB HBM3",)),
        _kind("h200-sxm", _HOPPER_PEAKS, "141GB", "4.8TB/s", ("NVIDIA H200",)),
        _kind("b200-sxm", _B200_PEAKS, "180GB", "8TB/s", ("NVIDIA B200",)),
        _kind(
            "ascend-910b",
            {"float16": "313TFLOP/s", "bfloat16": "313TFLOP/s"},
            "64GB",
            "1.6TB/s",
        ),
    )
}
"""Accelerators that a topology may name, by that name."""


def accelerator_named(name: str) -> Accelerator:
    """Return the accelerator of the catalog called `name`.

    Raises:
        UserError: there is none; the message gives the nearest name or all of them.
    """
    if name not in CATALOG:
        raise UserError(f"no accelerator is called '{name}'; {did_you_mean(name, CATALOG)}")
    return CATALOG[name]


def accelerator_of(device: Any) -> Accelerator | None:
    """Return the catalog's entry for a JAX device, or None for an unknown kind.

    A CPU device is `simulated`, which has no peak and so no utilization.
    """
    for accelerator in CATALOG.values():
        if device.device_kind in accelerator.device_kinds:
            return accelerator
    return None
