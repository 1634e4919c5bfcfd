"""The headline runs: every term of their steps, beside NVIDIA's program in the same layout.

    python benchmarks/headline.py --output benchmarks/results/headline.json
    python benchmarks/headline.py --runs nemotron4-340b --compile

Nemotron-4 340B on two sites of 1,536 H100 in the layout that NVIDIA published, and it and others in
the fastest layout that `geojax plan` finds, in bf16 and FP8. Steps are predicted by the planner's
cost model. Its error on published steps is in docs/records/predicted-steps.md; of models with
experts it is not known. A column is one program in one layout, a cell the seconds that a term adds
to a step. NVIDIA's program is `published.frameworks.NEMO_340B`. *Of one site* is the same program
without what the links expose. *If slower* is the most that a step takes if products need 10% more
time for as long as messages travel beside them.

With `--compile` our program in bf16 is compiled ahead of time for its GPUs (the extra `aot`), in
the published layout and in the fastest: its memory, and the share of each kind of message that
travels beside matrix products.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from published.frameworks import NEMO_340B
from published.two_sites import PUBLISHED_EFFICIENCY, PUBLISHED_MFU
from rich.console import Console
from rich.table import Table

from geojax.config.run_config import RunConfig
from geojax.models import ModelConfig
from geojax.planner.compile_target import CompileTarget
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.execution import GEOJAX, Execution
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.predict import predict
from geojax.planner.cost.prediction import Prediction
from geojax.planner.resolve.traced_run import compile_run
from geojax.planner.search.one_site import one_site_efficiency
from geojax.planner.search.request import PlanRequest
from geojax.planner.search.search import search
from geojax.topology import Topology

CONFIGS = Path(__file__).parents[1] / "configs"
FP8 = "fp8-current"
COMPRESSION = "bf16"
"""Format of gradients on the link, as in the published layout."""
VARIANTS: dict[str, dict[str, Any]] = {
    **{
        f"pipeline.head: {head}": {"pipeline": {"head": head}}
        for head in ("last_stage", "positions", "vocabulary")
    },
    **{
        f"gradients in {wire}, overlap_scatter: {scatter}": {
            "communication": {"gradient_compression": wire, "overlap_scatter": scatter}
        }
        for wire in ("bf16", "int8")
        for scatter in (True, False)
    },
}
"""Settings that are compared in the layouts of `COMPILED`."""
SLOWER = 0.1
"""Share by which products may be slower beside messages."""
COMPILED = ("published", "fastest")
"""Titles of the columns that `--compile` compiles."""


class Run(NamedTuple):
    """A model on two sites of H100."""

    hosts: int
    """Of 8 GPUs, in each site."""
    sequences: int
    """In a step."""
    length: int
    """Tokens of a sequence."""
    published: str
    """Of the same model, GPUs and length."""
    config: str | None = None
    """Shipped config in the published layout."""


RUNS = {
    "nemotron4-340b": Run(
        192,
        2304,
        4096,
        f"NVIDIA: {PUBLISHED_MFU:.0%} MFU, {PUBLISHED_EFFICIENCY:.0%} of one site",
        "nemotron4-340b-2x1536",
    ),
    "llama3-405b": Run(128, 2048, 8192, "none"),
    "llama3-70b": Run(8, 1024, 8192, "none"),
    "deepseek-v3-671b": Run(128, 4096, 4096, "none"),
}


class Column(NamedTuple):
    """A program in a layout."""

    title: str
    prediction: Prediction
    of_one_site: float

    @property
    def seconds_if_slower(self) -> float:
        """Seconds of a step whose products are slower beside messages, no two at a time."""
        terms = self.prediction.terms
        beside = sum(term.seconds - term.exposed_seconds for term in terms if term.messages)
        return self.prediction.step_seconds + SLOWER * beside

    def to_json(self) -> dict[str, Any]:
        made = self.prediction
        return {
            "title": self.title,
            "layout": made.layout.model_dump(mode="json", exclude_defaults=True),
            "seconds": made.step_seconds,
            "seconds_if_slower": self.seconds_if_slower,
            "mfu": made.model_flops_utilization,
            "of_one_site": self.of_one_site,
            "memory_bytes": made.memory_bytes,
            "terms": {
                term.name: {"seconds": term.seconds, "exposed": term.exposed_seconds}
                for term in made.terms
            },
        }


def topology_of(run: Run) -> Topology:
    topology = Topology.load("two-h100-sites")
    sites = tuple(site.model_copy(update={"hosts": run.hosts}) for site in topology.sites)
    return topology.model_copy(update={"sites": sites})


def timed(
    title: str,
    model: ModelConfig,
    topology: Topology,
    layout: LayoutCandidate,
    execution: Execution = GEOJAX,
) -> Column:
    def step(layout: LayoutCandidate, topology: Topology) -> Prediction:
        return predict(model, layout, topology, calibration=Calibration(), execution=execution)

    return Column(title, step(layout, topology), one_site_efficiency(layout, topology, step))


def columns(name: str, run: Run) -> Iterator[Column]:
    """Yield the programs of a run, those in the published layout first."""
    model, topology = ModelConfig.load(name), topology_of(run)

    def column(title: str, layout: LayoutCandidate, execution: Execution = GEOJAX) -> Column:
        return timed(title, model, topology, layout, execution)

    if run.config is not None:
        config = RunConfig.load(CONFIGS / f"{run.config}.yaml")
        layout = LayoutCandidate.of(config.layout)
        yield column("published", layout)
        yield column("NVIDIA's program", layout, NEMO_340B)
        yield column("published, FP8", layout.changed(precision=FP8))
    for precision, title in (("bf16", "fastest"), (FP8, "fastest, FP8")):
        request = PlanRequest(
            model,
            topology,
            run.sequences,
            run.length,
            precisions=(precision,),
            compressions=(COMPRESSION,),
        )
        found = search(
            request,
            lambda layout: predict(model, layout, topology, calibration=Calibration()),
            Calibration(),
        )
        yield column(title, found.best[0].prediction.layout)


def table(made: list[Column]) -> Table:
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    result.add_column("seconds of a step")
    for column in made:
        result.add_column(column.title, justify="right")
    names = dict.fromkeys(term.name for each in made for term in each.prediction.terms)
    largest = {
        name: max(
            term.exposed_seconds
            for each in made
            for term in each.prediction.terms
            if term.name == name
        )
        for name in names
    }
    for name in sorted(names, key=largest.__getitem__, reverse=True):
        terms = [{term.name: term for term in each.prediction.terms}.get(name) for each in made]
        result.add_row(
            name, *("" if each is None else f"{each.exposed_seconds:.2f}" for each in terms)
        )
    steps = [each.prediction for each in made]
    result.add_row("step", *(f"{each.step_seconds:.2f}" for each in steps), style="bold")
    result.add_row("if slower", *(f"{each.seconds_if_slower:.2f}" for each in made))
    result.add_row("MFU", *(f"{each.model_flops_utilization or 0:.1%}" for each in steps))
    result.add_row("of one site", *(f"{each.of_one_site:.1%}" for each in made))
    result.add_row("memory, GB", *(f"{each.memory_bytes / 1e9:.1f}" for each in steps))
    for title, of in (
        ("mesh", lambda each: "x".join(map(str, each.layout.mesh_sizes.values()))),
        ("schedule", lambda each: f"{each.layout.pipeline.schedule}"),
    ):
        result.add_row(title, *map(of, steps))
    return result


def variants(name: str, run: Run, column: Column) -> list[Column]:
    """The layout of a column with other settings."""
    model, topology, layout = ModelConfig.load(name), topology_of(run), column.prediction.layout
    return [
        timed(title, model, topology, layout.changed(**changes))
        for title, changes in VARIANTS.items()
    ]


def show_variants(column: Column, found: list[Column], console: Console) -> None:
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in (f"{column.title}, with", "step", "MFU", "of one site", "memory, GB"):
        result.add_column(title, justify="right" if result.columns else "left")
    for each in found:
        made = each.prediction
        result.add_row(
            each.title,
            f"{made.step_seconds:.2f}",
            f"{made.model_flops_utilization or 0:.1%}",
            f"{each.of_one_site:.1%}",
            f"{made.memory_bytes / 1e9:.1f}",
        )
    console.print(result)


def compiled(run: Run, layout: LayoutCandidate) -> dict[str, Any]:
    """The memory and the messages of a run's program in a layout, compiled for its GPUs."""
    assert run.config is not None
    config = RunConfig.load(CONFIGS / f"{run.config}.yaml")
    config = config.changed(**layout.model_dump(exclude_defaults=True))
    made = compile_run(config, CompileTarget.parse(f"h100:{config.mesh.devices}"))
    messages = [each.to_json() for each in made.messages]
    return {"memory_bytes": made.memory.bytes, "messages": messages}


def show_compiled(column: Column, made: dict[str, Any], console: Console) -> None:
    held, predicted = made["memory_bytes"], column.prediction.memory_bytes
    console.print(
        f"compiled, {column.title}: {held / 1e9:.1f} GB (predicted {predicted / 1e9:.1f} GB)"
    )
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("over", "collective", "sent", "beside products", "awaited"):
        result.add_column(title, justify="left" if title in ("over", "collective") else "right")
    for each in made["messages"]:
        sent = each["bytes_sent"]
        if sent < 1e6:
            continue
        shares = (each[key] / sent for key in ("bytes_beside_compute", "bytes_awaited"))
        cells = (f"{sent / 1e9:.2f} GB", *(f"{share:.0%}" for share in shares))
        result.add_row(each["axes"], each["kind"], *cells)
    console.print(result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="just these")
    parser.add_argument("--compile", action="store_true", help="compile our programs in bf16")
    parser.add_argument("--output", type=Path, help="JSON")
    arguments = parser.parse_args()
    console = Console(width=160, highlight=False)
    record: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "runs": {}}
    for name in arguments.runs:
        run, began = RUNS[name], time.monotonic()
        made = list(columns(name, run))
        entry: dict[str, Any] = {
            "columns": [each.to_json() for each in made],
            "published": run.published,
        }
        record["runs"][name] = entry
        console.print(
            f"\n{name} on 2 x {8 * run.hosts} H100, {run.sequences} sequences of {run.length}; "
            f"published: {run.published} ({time.monotonic() - began:.0f} s)",
            style="bold",
        )
        console.print(table(made))
        if run.config is not None:
            ours, theirs = (each.prediction.step_seconds for each in made[:2])
            console.print(
                f"tokens/s over NVIDIA's program in the published layout: {theirs / ours:.3f}"
            )
            for column in (each for each in made if each.title in COMPILED):
                found = variants(name, run, column)
                entry.setdefault("variants", {})[column.title] = [each.to_json() for each in found]
                show_variants(column, found, console)
        if arguments.compile and run.config is not None:
            entry["compiled"] = {}
            for column in made:
                if column.title in COMPILED:
                    of_column = compiled(run, column.prediction.layout)
                    entry["compiled"][column.title] = of_column
                    show_compiled(column, of_column, console)
        if arguments.output:
            arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
