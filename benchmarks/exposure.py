"""The exposed part of the sum over sites in the published layout, by bandwidth and format.

    python benchmarks/exposure.py

Nemotron-4 340B on two sites of 1,536 H100: PP 12, TP 8, DP 16 in each, 21 ms round trip, 8 chunks
a stage, as NVIDIA ran it. Predicted by `geojax.planner.buckets`, a step by its FLOPs: the
seconds of messages beyond the backwards that they travel beside, their share of the step, and the
bound max(0, bytes / bandwidth - window), with the window from the first part that is whole to the
end of the pipeline. What is above the bound is the last message, of the first chunk and the
embedding, and parts that last longer than the ticks beside them while others last less.
"""

import dataclasses
from pathlib import Path

from rich.console import Console
from rich.table import Table

from geojax.collectives.wire_format import wire_format
from geojax.planner.abstract_mesh import abstract_mesh
from geojax.planner.buckets import LinkShare, choose_buckets, step_times
from geojax.train.compiled_run import step_plan
from geojax.train.config import RunConfig

CONFIG = Path(__file__).parents[1] / "configs" / "nemotron4-340b-2x1536.yaml"
TERABITS = (0.4, 0.8, 1.6, 3.2, 6.4)
FORMATS = {"fp32": "none", "bf16": "bf16", "int8": "int8"}
H100_PEAK = 989e12


def main() -> None:
    config = RunConfig.load(CONFIG)
    plan = step_plan(config, abstract_mesh(config.mesh.model_dump(), platform="gpu"))
    batch = config.batch
    times = step_times(
        config.model, plan, batch.global_batch_size, batch.sequence_length, H100_PEAK
    )
    table = Table("Tbit/s", *(f"{name}: s, share, bound s" for name in FORMATS))
    for terabits in TERABITS:
        link = LinkShare("a-b", 0.021, terabits * 1e12 / 8, plan.mesh.size // 2)
        cells = []
        for name in FORMATS.values():
            of_format = dataclasses.replace(plan, wire_format=wire_format(name))
            choice = choose_buckets(
                config.model, of_format, link, times, 80 * 10**9, ["bucket_bytes"]
            )
            messages = choice.exposure.messages
            ticks = sum(each.ticks for each in messages.early)
            window = ticks * times.layer_backward_seconds
            bound = max(0.0, messages.bytes / link.bytes_per_second - window)
            exposed = choice.exposure.seconds
            cells.append(f"{exposed:.2f}, {exposed / times.step_seconds:.1%}, {bound:.2f}")
        table.add_row(f"{terabits:g}", *cells)
    Console(width=120).print(table, f"a step takes {times.step_seconds:.1f} s")


if __name__ == "__main__":
    main()
