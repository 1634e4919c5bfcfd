"""What is compared: ten layouts of one model, one batch, one optimizer."""

import dataclasses
from typing import Any

import numpy as np

from geojax import make_mesh
from geojax.config import layout as config
from geojax.models import ModelConfig
from geojax.optim import OptimizerSettings, learning_rate_schedule
from geojax.precision import policy
from geojax.step.plan import StepPlan

SEED, STEPS = 0, 100
SETTINGS = OptimizerSettings(warmup_steps=0)
SCHEDULE = learning_rate_schedule(SETTINGS, STEPS)

DEVICES, ROWS, SEQUENCE = 8, 8, 256
MODEL = ModelConfig(
    num_hidden_layers=4,
    hidden_size=256,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=704,
    vocab_size=2048,
    max_position_embeddings=SEQUENCE,
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """One row of the table."""

    axes: dict[str, Any]
    """The sizes of the mesh axes that are not 1."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The value of each setting that is not the default, by dotted key."""

    def __str__(self) -> str:
        sizes = " ".join(f"{axis}={size}" for axis, size in self.axes.items())
        return ", ".join([sizes, *(_WORDS[option] for option in self.options.items())])

    def plan(self, microbatches: int) -> StepPlan:
        """The layout on a mesh of simulated devices, in fp32."""
        batch = {"global_batch_size": ROWS, "sequence_length": SEQUENCE}
        settings: dict[str, Any] = {
            "mesh": self.axes,
            "batch": batch | {"microbatches": microbatches},
        }
        for key, value in self.options.items():
            section, _, name = key.partition(".")
            settings[section] = {name: value}
        layout = config.Layout.model_validate(settings)
        return StepPlan(make_mesh(**self.axes), policy("fp32"), layout)


_WORDS = {
    ("zero.stage", 1): "ZeRO 1",
    ("zero.stage", 2): "ZeRO 2",
    ("zero.stage", 3): "ZeRO 3",
    ("parallelism.sequence", True): "sequence parallel",
    ("parallelism.context_method", "ring"): "ring",
    ("parallelism.context_method", "all_gather"): "all-gather",
    ("parallelism.context_method", "ulysses"): "Ulysses",
}

LAYOUTS = (
    Layout({"dc": 2, "data": 4}, {"zero.stage": 1}),
    Layout({"dc": 2, "data": 4}, {"zero.stage": 2}),
    Layout({"dc": 2, "data": 4}, {"zero.stage": 3}),
    Layout({"data": 4, "tensor": 2}),
    Layout({"data": 4, "tensor": 2}, {"parallelism.sequence": True}),
    Layout({"dc": 2, "data": 2, "tensor": 2}, {"zero.stage": 3}),
    Layout({"data": 4, "context": 2}, {"parallelism.context_method": "ring"}),
    Layout({"data": 4, "context": 2}, {"parallelism.context_method": "all_gather"}),
    Layout({"data": 4, "context": 2}, {"parallelism.context_method": "ulysses"}),
    Layout({"dc": 2, "data": 2, "context": 2}, {"parallelism.context_method": "all_gather"}),
)


def host_batch() -> dict[str, np.ndarray]:
    """Random tokens, one document a row; the same batch every step."""
    shape = (ROWS, SEQUENCE)
    tokens = np.random.default_rng(SEED).integers(
        MODEL.vocab_size, size=(ROWS, SEQUENCE + 1), dtype=np.int32
    )
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_mask": np.ones(shape, np.float32),
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(SEQUENCE, dtype=np.int32), shape),
        "row": np.arange(ROWS, dtype=np.int32),
    }
