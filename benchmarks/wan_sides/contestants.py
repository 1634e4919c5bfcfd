"""Who takes part, as data."""

import dataclasses
from typing import Any

from geojax.pipeline import SCHEDULES
from wan_sides.work import MICROBATCHES, MODEL, ROWS, SEQUENCE, parameter_count


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One way to train the model over two sites."""

    name: str
    side: str
    """The module of `wan_sides` that a process runs."""
    role: str
    """What the sites are to each other: "data" or "stage"."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of its side."""
    variant: str = ""
    """Tells it from others of the same name, of which the fastest over the link counts."""
    rounded: bool = False
    """Whether gradients are rounded on the way, so that losses are not those of fp32."""
    quick: bool = True
    """Whether it takes part in a quick run."""
    repeats: int = 1
    """How often a step trains on the batch, one microbatch each time."""
    devices: int = 1
    """CPU devices of each process."""
    blocking: bool = False
    """Whether islands ask for a message only when nothing is left to compute without it."""
    formula_bytes: float | None = None
    """What a step sends over the link, both directions together; None: its side says it of the
    program that it compiled."""

    def __str__(self) -> str:
        return f"{self.name}, {self.variant}" if self.variant else self.name

    @property
    def is_torch(self) -> bool:
        """Whether its processes import PyTorch instead of JAX."""
        return self.side.startswith("torch")


def contestants() -> list[Contestant]:
    """All of them, in the table's order."""
    return [
        *_geojax_data(),
        *_islands(),
        _jit(),
        *_torch_data(),
        *_geojax_stage(),
        *_islands_stage(),
        *_torch_stage(),
    ]


LONG_STEPS = 8
"""Microbatches of a long step."""


def long_steps() -> list[Contestant]:
    """Every wire format where a step lasts so long that it can hide what the smallest sends."""
    one_program = [
        Contestant(
            f"geojax, {wire} gradients",
            "geojax_side",
            "data",
            {"communication": {"overlap_grad_reduce": True} | _compressed(wire)},
            variant=f"overlapped, {LONG_STEPS} microbatches",
            rounded=wire != "fp32",
            repeats=LONG_STEPS,
        )
        for wire in WIRES
    ]
    islands = [
        dataclasses.replace(
            each, variant=f"{each.variant}, {LONG_STEPS} microbatches", repeats=LONG_STEPS
        )
        for each in _islands()
    ]
    return [*one_program, *islands]


def long_pipelines(repeats: int) -> list[Contestant]:
    """Pipelines whose steps have `repeats` times the microbatches."""
    chosen = [*_islands_stage(), *(each for each in _torch_stage() if "1F1B" in each.name)]
    return [
        dataclasses.replace(
            each,
            variant=f"{repeats * MICROBATCHES} microbatches",
            repeats=repeats,
            formula_bytes=each.formula_bytes and repeats * each.formula_bytes,
        )
        for each in chosen
    ]


DEEP_REPEATS, DEEP_STAGES = 6, 4
SMALL_MODEL = MODEL | {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 352}
"""A stage of one layer works so briefly on a microbatch that the latency of the link rules."""


def deep_pipelines() -> list[Contestant]:
    """Four stages in each site, which share its core, of a small model.

    As many microbatches are held as there are stages.
    """
    stages = 2 * DEEP_STAGES
    strict, hiding = (
        Contestant(
            f"geojax islands {name}, {stages} stages",
            "islands_side",
            "stage",
            {
                "dc": {"join": "islands"},
                "mesh": {"dc": 2, "stage": DEEP_STAGES},
                "model": SMALL_MODEL,
                "pipeline": {"schedule": name, "memory_limit": stages},
            },
            variant=f"{DEEP_REPEATS * MICROBATCHES} microbatches",
            repeats=DEEP_REPEATS,
            devices=DEEP_STAGES,
        )
        for name in ISLAND_SCHEDULES
    )
    return [_with_blocking_hops(strict), strict, hiding]


WIRES = ("fp32", "bf16", "int8")
"""Formats of gradients on the link."""


def _geojax_data() -> list[Contestant]:
    return [each for wire in WIRES for each in _geojax_wire(wire)]


def _compressed(wire: str) -> dict[str, str]:
    return {} if wire == "fp32" else {"gradient_compression": wire}


def _geojax_wire(wire: str) -> list[Contestant]:
    tries = {
        "one bucket": {"bucket_bytes": 2**30},
        "16 MB buckets": {"bucket_bytes": 2**24},
        "overlapped": {"overlap_grad_reduce": True},
    }
    return [
        Contestant(
            f"geojax, {wire} gradients",
            "geojax_side",
            "data",
            {"communication": settings | _compressed(wire)},
            variant=variant,
            rounded=wire != "fp32",
            quick=variant != "16 MB buckets",
        )
        for variant, settings in tries.items()
    ]


BUCKET_LAYERS = {"4 buckets": "auto", "8 buckets": 1}
"""Sizes of buckets that islands try."""


def _islands() -> list[Contestant]:
    """Sites with a runtime of their own, which exchange gradients breadth-first by chunk."""
    return [
        Contestant(
            f"geojax islands, {wire} gradients",
            "islands_side",
            "data",
            {
                "dc": {"join": "islands"},
                "communication": {"bucket_layers": layers} | _compressed(wire),
            },
            variant=variant,
            rounded=wire != "fp32",
            quick=layers == "auto",
        )
        for wire in WIRES
        for variant, layers in BUCKET_LAYERS.items()
    ]


def _jit() -> Contestant:
    return Contestant("jit, automatic sharding", "jit_side", "data")


BUCKET_MEGABYTES = {5: False, 25: True, 100: True}
"""Sizes that PyTorch's side tries, and whether a quick run does."""


def _torch_data() -> list[Contestant]:
    # A ring of two: each site sends every gradient once, in float32.
    ring = 2 * 4 * parameter_count()
    names = {"ddp": "PyTorch DDP", "hierarchical": "PyTorch hierarchical"}
    return [
        Contestant(
            name,
            "torch_data_side",
            "data",
            {"method": method, "bucket_megabytes": size},
            variant=f"{size} MB buckets",
            quick=quick,
            formula_bytes=ring,
        )
        for method, name in names.items()
        for size, quick in BUCKET_MEGABYTES.items()
    ]


HOP_TICKS = {"geopipe": 2, "latency_hiding": 2, "latency_hiding_split": 2}
QUICK_SCHEDULES = ("branch_free", "gpipe", "1f1b", "latency_hiding", "interleaved")


def _geojax_stage() -> list[Contestant]:
    """geojax's schedules of two sites with a stage each."""
    return [
        Contestant(
            f"geojax {name}",
            "geojax_side",
            "stage",
            {
                "pipeline": {
                    "schedule": name,
                    "virtual_stages": entry.virtual_stages or 2,
                    "hop_ticks": HOP_TICKS.get(name, 1),
                }
            },
            quick=name in QUICK_SCHEDULES,
        )
        for name, entry in SCHEDULES.items()
    ]


ISLAND_SCHEDULES = {"1f1b": {}, "latency_hiding": {"memory_limit": 4}}


def _islands_stage() -> list[Contestant]:
    """Sites with a runtime of their own, a stage each; strict 1F1B with blocking hops as well."""
    by_schedule = {
        name: Contestant(
            f"geojax islands {name}",
            "islands_side",
            "stage",
            {"dc": {"join": "islands"}, "pipeline": {"schedule": name} | limit},
        )
        for name, limit in ISLAND_SCHEDULES.items()
    }
    return [_with_blocking_hops(by_schedule["1f1b"]), *by_schedule.values()]


def _with_blocking_hops(contestant: Contestant) -> Contestant:
    return dataclasses.replace(
        contestant, name=f"{contestant.name} of blocking hops", blocking=True, quick=False
    )


def _torch_stage() -> list[Contestant]:
    # A microbatch's stream crosses each cut, and its gradient comes back.
    stream = 4 * (ROWS // MICROBATCHES) * SEQUENCE * MODEL["hidden_size"]
    chunks_of = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2}
    return [
        Contestant(
            f"PyTorch {name}",
            "torch_stage_side",
            "stage",
            {"schedule": name, "chunks": chunks},
            formula_bytes=2 * MICROBATCHES * stream * (2 * chunks - 1),
        )
        for name, chunks in chunks_of.items()
    ]
