"""Counts, times, sizes and rates in configs: a number in the base unit, or a string with a unit.

The unit is part of the field's name (`round_trip_seconds`, `bytes_per_second`), and a plain number
is in that unit. A string has a number and a unit, with or without a space:

    seconds             21ms   4us   0.5s         (ns, us, ms, s)
    bytes               80GB   4MiB  512B         (B, kB, MB, GB, TB; KiB, MiB, GiB, TiB)
    bytes per second    450GB/s   100Gbit/s       (the same, and bit/s, kbit/s ... Tbit/s)
                        200mbit                   (as tc writes them: kbit, mbit, gbit)
    FLOP per second     989TFLOP/s                (FLOP/s, kFLOP/s ... PFLOP/s)
    share               0.1%   0.001
    tokens              9T     1.5B               (k, M, B, T)

k, M, G, T and P are powers of 1000, Ki, Mi, Gi and Ti of 1024.

A field annotated with one of the types below holds the number in the base unit after validation.
"""

import dataclasses
import re
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator, Field


@dataclasses.dataclass(frozen=True)
class InWords:
    """A mark of a type: its name in help."""

    words: str


_LONGEST = 1e11

_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

_TIME_UNITS = {
    "s": Fraction(1),
    "ms": Fraction(1, 10**3),
    "us": Fraction(1, 10**6),
    "ns": Fraction(1, 10**9),
}
_SIZE_UNITS = {f"{prefix}B": Fraction(factor) for prefix, factor in (_DECIMAL | _BINARY).items()}
_RATE_UNITS = {f"{unit}/s": factor for unit, factor in _SIZE_UNITS.items()} | {
    f"{prefix}bit/s": Fraction(factor, 8) for prefix, factor in _DECIMAL.items()
}
_RATE_UNITS |= {
    "kbit": Fraction(10**3, 8),
    "mbit": Fraction(10**6, 8),
    "gbit": Fraction(10**9, 8),
}
_COMPUTE_UNITS = {
    f"{prefix}FLOP/s": Fraction(factor) for prefix, factor in (_DECIMAL | {"P": 10**15}).items()
}


def _reader(base: str, units: dict[str, Fraction], example: str) -> BeforeValidator:
    """Make the validator that turns "21ms" into 0.021 and leaves other types to pydantic."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        # Two digits of exponent: of more, Python would compute the number with all of its digits.
        match = re.fullmatch(r"\s*([0-9.]{1,40}(?:[eE][-+]?[0-9]{1,2})?)\s*([A-Za-z/%]*)\s*", value)
        factor = (units | {"": Fraction(1)}).get(match[2]) if match else None
        if match is None or factor is None:
            raise ValueError(f"'{value}' is not a number of {base} nor one with a unit: {example}")
        try:
            exact = Fraction(match[1]) * factor  # 0.1us is the float nearest to 1e-7, not two off
        except ValueError:
            raise ValueError(f"'{match[1]}' in '{value}' is not a number") from None
        return int(exact) if exact.denominator == 1 else float(exact)

    return BeforeValidator(read, json_schema_input_type=float | str)


Count = Annotated[int, Field(gt=0, le=2**20)]
"""A number of ranks, layers, sequences or other things of which a program makes a list."""

Length = Annotated[int, Field(gt=0, le=2**28)]
"""A number of tokens or positions, or the length of an array's dim."""

StepCount = Annotated[int, Field(gt=0, le=10**9)]
"""A number of optimizer steps."""

SimulatedDevices = Annotated[int, Field(gt=0, le=2**10)]
"""A number of CPU devices that one process simulates; starting them takes quadratic time."""

Seconds = Annotated[
    float,
    _reader("seconds", _TIME_UNITS, "21ms, 4us, 0.5s"),
    Field(ge=0, le=1e8),
    InWords("a number of seconds"),
]
"""A duration in seconds, from zero to three years."""

Bytes = Annotated[
    int,
    _reader("bytes", _SIZE_UNITS, "80GB, 4MiB, 512B"),
    Field(gt=0, le=10**18),
    InWords("a number of bytes"),
]
"""A size in bytes, from one to 10^18."""

BytesPerSecond = Annotated[
    float,
    _reader("bytes per second", _RATE_UNITS, "450GB/s, 100Gbit/s"),
    Field(ge=1, le=1e18),
    InWords("a number of bytes per second"),
]
"""A bandwidth in bytes per second, from one to 10^18."""

FlopsPerSecond = Annotated[
    float,
    _reader("FLOP per second", _COMPUTE_UNITS, "989TFLOP/s, 1.979PFLOP/s"),
    Field(ge=1, le=1e21),
    InWords("a number of FLOP per second"),
]
"""A rate of floating-point operations, from one to 10^21."""

Share = Annotated[
    float,
    _reader("parts of one", {"%": Fraction(1, 100)}, "0.1%, 0.001"),
    Field(ge=0, lt=1),
    InWords("a share, such as 0.1%"),
]
"""A part of a whole, from zero to less than one."""

Tokens = Annotated[
    float,
    _reader(
        "tokens",
        {"k": Fraction(10**3), "M": Fraction(10**6)}
        | {"B": Fraction(10**9), "T": Fraction(10**12)},
        "9T, 1.5B",
    ),
    Field(gt=0, le=1e18),
    InWords("a number of tokens"),
]
"""A number of tokens, to 10^18."""


def duration(seconds: float) -> str:
    """Return a time in its two largest units: 3.2 s, 4 min 10 s, 2 h 5 min, 3 d 4 h."""
    if abs(seconds) >= _LONGEST:
        return f"{seconds:.3g} s"
    if abs(seconds) < 0.9995:
        return f"{1e3 * seconds:.3g} ms" if seconds else "0 s"
    if abs(seconds) < 99.5:
        return f"{seconds:.3g} s"
    for size, unit, smaller, smaller_unit in (
        (86_400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        whole, rest = divmod(round(seconds / smaller), size // smaller)
        if whole:
            return f"{whole:,} {unit}" + (f" {rest} {smaller_unit}" if rest else "")
    raise AssertionError("a minute has 60 seconds")


def quantity(value: float, unit: str = "") -> str:
    """Format with three digits and a prefix: 1.2 GB, 830 tokens/s; a plain count as 5.1M, 341B."""
    for limit, prefix in ((1e12, "T"), (1e9, "G" if unit else "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * limit:  # what rounds to 1000 takes the next prefix
            return f"{value / limit:.3g}{' ' if unit else ''}{prefix}{unit}"
    return f"{value:.3g}{' ' if unit else ''}{unit}"
