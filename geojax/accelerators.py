"""Catalog of accelerators: peak rates, memory and networks, as published by their makers.

Peaks are dense (no structured sparsity) and count a multiply-add as two operations. A network's
bandwidth counts one device and one direction, half of the sum that makers print. Sources:

    A100         NVIDIA A100 data sheet and architecture white paper (108 SMs); DGX A100 data sheet
                 (NVLink 600 GB/s, a 200 Gbit/s card each)
    H100         NVIDIA H100 data sheet (SXM, PCIe, NVL; figures with sparsity halved) and
                 architecture white paper (132 and 114 SMs); DGX H100 data sheet (NVLink 900 GB/s,
                 a 400 Gbit/s card each)
    H200, GH200  NVIDIA H200 and GH200 (HBM3, 96 GB) data sheets; the compute of an H100 SXM
    B200         DGX B200 data sheet, an eighth of its eight GPUs (NVLink 1.8 TB/s, 148 SMs)
    GB200        GB200 NVL72 data sheet, a 72nd of it
    MI300X       AMD Instinct MI300X data sheet (304 CUs; seven Infinity Fabric links of 64 GB/s)
    TPU          Google Cloud's pages "TPU v5e", "TPU v5p" and "TPU v6e" (ICI of all links of a
                 chip); float8 is run as int8 there and has no entry
    Ascend       Huawei publishes no data sheet of the 910B: figures that are widely reported for
                 the training card
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
    multiprocessors: int | None = pydantic.Field(default=None, ge=1, le=2**16)
    """Units that each compute one tile of a matrix product at a time (SMs, CUs); None: tiles are
    not dealt out in such waves, or not known to be."""
    inside_host_bytes_per_second: BytesPerSecond | None = None
    """Bandwidth from one device to the others of its host, rack or pod (NVLink, ICI), for
    topologies that do not say."""
    between_hosts_bytes_per_second: BytesPerSecond | None = None
    """Bandwidth of a device's share of the network cards in its maker's reference system, for
    topologies that do not say."""
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
    *,
    units: int | None = None,
    inside: str | None = None,
    between: str | None = None,
) -> Accelerator:
    return Accelerator.model_validate(
        {
            "name": name,
            "peak_flops_per_second": peaks,
            "memory_bytes": memory,
            "memory_bytes_per_second": bandwidth,
            "multiprocessors": units,
            "inside_host_bytes_per_second": inside,
            "between_hosts_bytes_per_second": between,
            "device_kinds": device_kinds,
        }
    )


def _nvidia(
    name: str,
    peaks: dict[str, str],
    memory: str,
    bandwidth: str,
    kind: str,
    units: int,
    inside: str,
    between: str,
) -> Accelerator:
    return _kind(
        name,
        peaks,
        memory,
        bandwidth,
        (f"NVIDIA {kind}",),
        units=units,
        inside=inside,
        between=between,
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

_H100_PCIE_PEAKS = {
    "float64": "51TFLOP/s",
    "float32": "51TFLOP/s",
    "tensorfloat32": "378TFLOP/s",
    "float16": "756TFLOP/s",
    "bfloat16": "756TFLOP/s",
    "float8": "1513TFLOP/s",
}
_H100_NVL_PEAKS = {
    "float64": "60TFLOP/s",
    "float32": "60TFLOP/s",
    "tensorfloat32": "417.5TFLOP/s",
    "float16": "835.5TFLOP/s",
    "bfloat16": "835.5TFLOP/s",
    "float8": "1670.5TFLOP/s",
}
_GB200_PEAKS = {
    "float64": "40TFLOP/s",
    "float32": "80TFLOP/s",
    "tensorfloat32": "1.25PFLOP/s",
    "float16": "2.5PFLOP/s",
    "bfloat16": "2.5PFLOP/s",
    "float8": "5PFLOP/s",
}
_MI300X_PEAKS = {
    "float64": "163.4TFLOP/s",
    "float32": "163.4TFLOP/s",
    "tensorfloat32": "653.7TFLOP/s",
    "float16": "1307.4TFLOP/s",
    "bfloat16": "1307.4TFLOP/s",
    "float8": "2614.9TFLOP/s",
}

CATALOG: dict[str, Accelerator] = {
    accelerator.name: accelerator
    for accelerator in (
        _kind("simulated", {}, device_kinds=("cpu",)),
        _nvidia(
            "a100-sxm-40gb",
            _A100_PEAKS,
            "40GB",
            "1555GB/s",
            "A100-SXM4-40GB",
            108,
            "300GB/s",
            "200Gbit/s",
        ),
        _nvidia(
            "a100-sxm-80gb",
            _A100_PEAKS,
            "80GB",
            "2039GB/s",
            "A100-SXM4-80GB",
            108,
            "300GB/s",
            "200Gbit/s",
        ),
        _nvidia(
            "h100-sxm",
            _HOPPER_PEAKS,
            "80GB",
            "3.35TB/s",
            "H100 80GB HBM3",
            132,
            "450GB/s",
            "400Gbit/s",
        ),
        _nvidia(
            "h100-pcie",
            _H100_PCIE_PEAKS,
            "80GB",
            "2TB/s",
            "H100 PCIe",
            114,
            "64GB/s",
            "400Gbit/s",
        ),
        _nvidia(
            "h100-nvl", _H100_NVL_PEAKS, "94GB", "3.9TB/s", "H100 NVL", 132, "64GB/s", "400Gbit/s"
        ),
        _nvidia("h200-sxm", _HOPPER_PEAKS, "141GB", "4.8TB/s", "H200", 132, "450GB/s", "400Gbit/s"),
        _nvidia(
            "gh200", _HOPPER_PEAKS, "96GB", "4TB/s", "GH200 480GB", 132, "450GB/s", "400Gbit/s"
        ),
        _nvidia("b200-sxm", _B200_PEAKS, "180GB", "8TB/s", "B200", 148, "900GB/s", "400Gbit/s"),
        _nvidia("gb200", _GB200_PEAKS, "186GB", "8TB/s", "GB200", 148, "900GB/s", "400Gbit/s"),
        _kind(
            "mi300x",
            _MI300X_PEAKS,
            "192GB",
            "5.3TB/s",
            ("AMD Instinct MI300X",),
            units=304,
            inside="448GB/s",
            between="400Gbit/s",
        ),
        _kind(
            "tpu-v5e",
            {"bfloat16": "197TFLOP/s"},
            "16GB",
            "819GB/s",
            ("TPU v5 lite",),
            inside="200GB/s",
        ),
        _kind(
            "tpu-v5p",
            {"bfloat16": "459TFLOP/s"},
            "95GB",
            "2765GB/s",
            ("TPU v5",),
            inside="600GB/s",
        ),
        _kind(
            "tpu-v6e",
            {"bfloat16": "918TFLOP/s"},
            "32GB",
            "1640GB/s",
            ("TPU v6 lite",),
            inside="400GB/s",
        ),
        _kind(
            "ascend-910b",
            {"float16": "313TFLOP/s", "bfloat16": "313TFLOP/s"},
            "64GB",
            "1.6TB/s",
            inside="196GB/s",
            between="200Gbit/s",
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
