"""Every choice that a run's config leaves open, for the shipped configs and drawn ones.

    python benchmarks/choices.py [--json FILE] [--before FILE]

Each config is resolved on a mesh without devices, for the topology that it names. The drawn ones
vary a shipped config: microbatches, schedule, chunks, precision, and the rate and round trip of the
link. `--before` takes the figures of another version, and prints the choices that differ.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.planner.resolve.choices import resolved_plan
from geojax.planner.resolve.traced_run import abstract_run_mesh
from geojax.step.plan import StepPlan
from geojax.topology import SiteLink

CONFIGS = Path(__file__).parents[1] / "configs"
SHIPPED = tuple(path.stem for path in sorted(CONFIGS.glob("*.yaml")))
DRAWS, SEED = 10, 20261125


def choices_of(plan: StepPlan) -> dict[str, Any]:
    """Name the choices of a plan."""
    ticks = plan.tick_program and plan.tick_program.ticks
    return {
        "bucket_bytes": plan.bucket_bytes,
        "overlap_grad_reduce": plan.overlap_grad_reduce,
        "bucket_layers": plan.bucket_layers,
        "layers": plan.staged_layers and list(plan.staged_layers.layers_per_chunk),
        "hop_ticks": ticks and max(ticks.hop_ticks, default=1),
        "ticks": ticks and ticks.ticks,
    }


def drawn(generator: random.Random) -> tuple[str, RunConfig]:
    """Vary a shipped config that names a topology."""
    while True:
        name = generator.choice([each for each in SHIPPED if each != "quickstart"])
        settings = {
            "batch.microbatches": generator.choice([1, 2, 4, 8, 16]),
            "communication.bucket_bytes": "auto",
            "communication.overlap_grad_reduce": "auto",
            "communication.bucket_layers": "auto",
            "pipeline.hop_ticks": "auto",
        }
        config = RunConfig.load(CONFIGS / f"{name}.yaml")
        if config.pipeline_stages > 1:
            settings["pipeline.schedule"] = generator.choice(
                ["branch_free", "1f1b", "geopipe", "zero_bubble_h1", "latency_hiding"]
            )
            settings["pipeline.virtual_stages"] = 1
            settings["pipeline.layers"] = "null"
            settings["batch.microbatches"] = generator.choice([16, 32])
        rate, trip = generator.choice([1e9, 1e10, 1e11]), generator.choice([0.005, 0.021, 0.1])
        try:
            config = RunConfig.load(
                CONFIGS / f"{name}.yaml", [f"--{key}={value}" for key, value in settings.items()]
            )
        except UserError:
            continue
        topology = config.load_topology()
        if topology is None or not topology.links:
            continue
        link = SiteLink(
            sites=topology.links[0].sites, round_trip_seconds=trip, bytes_per_second=rate
        )
        adapt = config.adapt.model_copy(update={"links": (link,)})
        described = ", ".join(
            f"{key}={value}" for key, value in settings.items() if value != "auto"
        )
        return (
            f"{name}: {described}, {8 * rate / 1e9:g} Gbit/s, {trip * 1e3:g} ms",
            config.model_copy(update={"adapt": adapt}),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the choices")
    parser.add_argument("--before", type=Path, help="choices of another version, to compare with")
    arguments = parser.parse_args()
    generator = random.Random(SEED)
    configs = {name: RunConfig.load(CONFIGS / f"{name}.yaml") for name in SHIPPED}
    configs |= dict(drawn(generator) for _ in range(DRAWS))
    found = {}
    for name, config in configs.items():
        try:
            found[name] = choices_of(resolved_plan(config, abstract_run_mesh(config)))
        except UserError as error:
            found[name] = {"error": str(error)}
        print(name, json.dumps(found[name]), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if arguments.before is not None:
        before = json.loads(arguments.before.read_text(encoding="utf-8"))
        for name, choices in found.items():
            for key, value in choices.items():
                if before.get(name, {}).get(key) != value:
                    print(f"{name}: {key} was {before.get(name, {}).get(key)}, is {value}")


if __name__ == "__main__":
    main()
