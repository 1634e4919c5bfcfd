"""The published step times as models, layouts and topologies."""

import csv
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from geojax.models import ModelConfig
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.execution import Execution
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.predict import predict
from geojax.planner.cost.prediction import Prediction
from geojax.topology import Topology
from published.frameworks import MAXTEXT, MEGATRON_2021, NEMO, NEMO_340B

FOLDER = Path(__file__).parents[1] / "reference"

SC21_MICROBATCH = dict(
    zip(
        ("1.7", "3.6", "7.5", "18.4", "39.1", "76.1", "145.6", "310.1", "529.6", "1008.0"),
        (16, 16, 16, 8, 4, 2, 2, 1, 1, 1),
        strict=True,
    )
)
"""Sequences of a microbatch (MBS in run_table_1.sh), by billions of parameters."""

SC21_LAYERS_PER_CHUNK = {"76.1": 5, "145.6": 5, "310.1": 3, "529.6": 1}
"""Layers of a chunk where stages have several (--num-layers-per-virtual-pipeline-stage)."""

REPORT_VIRTUAL_STAGES = 8
"""Chunks of a stage in Nemotron-4's report, which interleaves 96 layers over 12 stages and prints
no number: one layer each, as in NVIDIA's recipe."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One published step time."""

    name: str
    accelerator: str
    model: ModelConfig
    layout: LayoutCandidate
    execution: Execution
    seconds: float

    @property
    def constant(self) -> tuple[str, str]:
        """Accelerator and precision of the constant that the row depends on."""
        return self.accelerator, "float8" if self.layout.precision.startswith("fp8") else "bfloat16"

    def predict(self, calibration: Calibration) -> Prediction:
        hosts = self.layout.devices // 8
        site = {
            "name": "one",
            "hosts": hosts,
            "accelerators_per_host": 8,
            "accelerator": self.accelerator,
        }
        return predict(
            self.model,
            self.layout,
            Topology(sites=(site,)),
            calibration=calibration,
            execution=self.execution,
        )


def published_rows() -> list[Row]:
    return [*_megatron(), *_nemotron(), *_h100()]


def _read(name: str) -> Iterator[dict[str, str]]:
    with (FOLDER / name).open() as file:
        yield from csv.DictReader(line for line in file if not line.startswith("#"))


def _layout(row: dict[str, Any], batch: str, **changes: Any) -> LayoutCandidate:
    stages, tensor = int(row["pp"]), int(row["tp"])
    context = int(row.get("cp") or 1)
    data = int(row["gpus"]) // (stages * tensor * context)
    size = changes.pop("microbatch_size", 1)
    virtual = changes.pop("virtual_stages", 1)
    layers = changes.pop("num_layers")
    chunks = stages * virtual
    return LayoutCandidate.made(
        sequence_length=changes.pop("sequence_length"),
        microbatches=int(row[batch]) // (data * size),
        microbatch_size=size,
        mesh={"stage": stages, "data": data, "context": context, "tensor": tensor},
        parallelism={"sequence": changes.pop("sequence_parallel", tensor > 1)},
        zero={"stage": changes.pop("zero_stage", 1)},
        pipeline={
            "virtual_stages": virtual,
            "layers": (layers // chunks,) * chunks,
            "schedule": "interleaved" if virtual > 1 else "1f1b",
        },
        **changes,
    )


def _megatron() -> Iterator[Row]:
    for row in _read("megatron_sc21_table1.csv"):
        name, layers = row["params_b"], int(row["layers"])
        chunk = SC21_LAYERS_PER_CHUNK.get(name)
        hidden = int(row["hidden"])
        model = ModelConfig(
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=int(row["heads"]),
            intermediate_size=4 * hidden,
            vocab_size=51200,
            max_position_embeddings=2048,
            norm="layernorm",
            hidden_act="gelu_pytorch_tanh",
            position_embedding_type="learned_absolute",
            tie_word_embeddings=True,
        )
        layout = _layout(
            row,
            "batch",
            sequence_length=2048,
            num_layers=layers,
            virtual_stages=layers // int(row["pp"]) // chunk if chunk else 1,
            microbatch_size=SC21_MICROBATCH[name],
            sequence_parallel=False,
            remat="full",
            zero_stage=0,
        )
        seconds = float(row["iter_s"])
        yield Row(
            f"GPT {name}B, {row['gpus']} A100 (SC21)",
            "a100-sxm-80gb",
            model,
            layout,
            MEGATRON_2021,
            seconds,
        )


def _nemotron() -> Iterator[Row]:
    for row in _read("nemotron4_340b.csv"):
        layout = _layout(
            row,
            "global_batch",
            sequence_length=4096,
            num_layers=96,
            virtual_stages=int(row["vp"] or REPORT_VIRTUAL_STAGES),
            precision=_precision(row),
        )
        name = f"Nemotron-4 340B, {row['gpus']} H100 {row['precision']} ({row['source']})"
        model = ModelConfig.load("nemotron4-340b")
        yield Row(name, "h100-sxm", model, layout, NEMO_340B, float(row["iter_s"]))


def _h100() -> Iterator[Row]:
    presets = {"llama3.1-70b": "llama3-70b", "llama2-70b": "llama2-70b"}
    for row in _read("h100_step_times.csv"):
        jax = row["framework"] == "maxtext"
        model = ModelConfig.load(presets[row["model"]])
        layout = _layout(
            row,
            "global_batch",
            sequence_length=int(row["sequence"]),
            num_layers=80,
            virtual_stages=int(row["vp"]),
            precision=_precision(row),
            microbatch_size=2 if jax else 1,
            zero_stage=3 if jax else 1,
        )
        name = f"{row['model']}, {row['gpus']} H100 {row['precision']} ({row['framework']})"
        yield Row(
            name,
            "h100-sxm",
            model,
            layout,
            MAXTEXT if jax else NEMO,
            float(row["step_s"]),
        )


def _precision(row: dict[str, str]) -> str:
    return "fp8-delayed" if row["precision"] == "fp8" else "bf16"
