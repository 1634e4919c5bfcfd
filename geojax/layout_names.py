"""Names of a layout's choices, as configs and command lines write them."""

from typing import Literal, TypeAlias

DcRole: TypeAlias = Literal["data", "stage"]
"""The part of a site: "data", it trains on its share of the batch; "stage", it holds a part of the
pipeline."""

Join: TypeAlias = Literal["one_program", "islands"]
"""Runtimes of a run: one that spans all sites, or one in every site."""

WireName: TypeAlias = Literal["none", "bf16", "int8"]
"""Names of wire formats; with "none" numbers travel as they are."""

PrecisionName: TypeAlias = Literal[
    "fp32",
    "bf16",
    "fp16",
    "fp64",
    "fp8-delayed",
    "fp8-current",
    "fp8-block",
    "fp8-mxfp8",
]
"""Names of precision policies."""
