"""The one constant per accelerator and precision, each from one published step time."""

from collections.abc import Sequence

from geojax.planner.cost.calibration import Calibration
from published.rows import Row

FITTED_ON = {
    ("a100-sxm-80gb", "bfloat16"): "GPT 145.6B, 1536 A100 (SC21)",
    ("h100-sxm", "bfloat16"): "Nemotron-4 340B, 128 H100 bf16 (dgxc)",
    ("h100-sxm", "float8"): "Nemotron-4 340B, 128 H100 fp8 (dgxc)",
}
"""The row that sets each constant; in FP8 the head and attention still take the 16-bit one."""


def fitted(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Return the shares of the peak with which the named rows are predicted exactly."""
    by_name = {row.name: row for row in rows}
    efficiency: dict[tuple[str, str], float] = {}
    for key, name in FITTED_ON.items():
        efficiency[key] = _bisect(by_name[name], efficiency, key)
    return efficiency


def _bisect(row: Row, known: dict[tuple[str, str], float], key: tuple[str, str]) -> float:
    low, high = 0.1, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        seconds = row.predict(Calibration({**known, key: middle})).step_seconds
        low, high = (middle, high) if seconds > row.seconds else (low, middle)
    return (low + high) / 2
