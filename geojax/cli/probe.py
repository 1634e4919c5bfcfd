"""`geojax probe`: health and speed of devices, networks and links."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import pydantic
import tyro
from rich.console import Console

from geojax.errors import UserError
from geojax.exit_codes import UNHEALTHY
from geojax.quantities import SimulatedDevices
from geojax.settings import Settings

if TYPE_CHECKING:
    from geojax.accelerators import Precision
    from geojax.config.run_config import RunConfig
    from geojax.pipeline.simulation.stage_times import StageTimes
    from geojax.probe import Figures, ProbeContext
    from geojax.runtime import ProcessSettings

_CHECKS = ("devices", "networks", "links", "hosts", "stages")


class ProbeCommand(Settings):
    """Measure devices, networks inside the sites, links between them and hosts, and flag slow ones.

    On several processes: `geojax launch -- probe`, or the same command everywhere, as for training.
    With CONFIG, the command compares the links with its topology and measures the pieces of a
    pipeline stage. Options change settings: `--seed 1`. Exit code 0: nothing is slow (there may be
    advice). 3: something is slow. 1: something did not answer. 2: bad input.
    """

    config: tyro.conf.Positional[tuple[Path, ...]] = ()
    """YAML file of a run; optional."""

    checks: tuple[str, ...] = _CHECKS
    """Checks to run: devices, networks, links, hosts, stages. stages are the pieces of CONFIG's
    model."""

    streams: tuple[Annotated[int, pydantic.Field(ge=1, le=256)], ...] = pydantic.Field(
        default=(1, 2, 4, 8), min_length=1
    )
    """Numbers of TCP streams to measure the links with, one after the other."""

    simulate_devices: SimulatedDevices | None = None
    """CPU devices to simulate in this process; default: as in CONFIG."""

    output: Path | None = None
    """YAML file for the measured topology, for `topology:` of a config."""

    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """File for all figures."""

    stage_times: Path | None = None
    """YAML file for the times of CONFIG's pieces, for `geojax plan --stage-times`."""


def run(command: ProbeCommand, overrides: Sequence[str]) -> int:
    """Measure, print tables, write files, and return the exit code: 3 if something is slow."""
    if len(command.config) > 1:
        raise UserError(f"{command.config[1]}: one CONFIG is enough")
    if not command.config and overrides:
        raise UserError(f"unknown argument {overrides[0]}; without CONFIG there is none to change")
    if command.stage_times is not None and (not command.config or "stages" not in command.checks):
        raise UserError(f"--stage-times {command.stage_times}: needs CONFIG and the check 'stages'")
    unknown = [check for check in command.checks if check not in _CHECKS]
    if unknown:
        raise UserError(f"--checks {unknown[0]}: there are {', '.join(_CHECKS)}")
    for path in (command.output, command.json_file, command.stage_times):
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError(f"{path}: its folder does not exist")
    # Imported here, so that `geojax --help` need not wait for JAX.
    from geojax.config.run_config import RunConfig

    config = RunConfig.load(command.config[0], overrides) if command.config else None
    if config is not None and config.model.lora is not None and "stages" in command.checks:
        raise UserError(
            f"{command.config[0]}: pieces of a model with adapters (model.lora) are not measured; "
            "leave the check 'stages' out, or remove lora"
        )

    import jax

    from geojax import runtime
    from geojax.cli.probe_tables import show
    from geojax.job.cluster_env import complete
    from geojax.precision import policy
    from geojax.probe import CHECKS, ProbeContext, probe
    from geojax.topology import Topology

    described = Topology.load(config.topology) if config and config.topology else None
    settings = complete(_processes(command.simulate_devices, config), os.environ)
    context = ProbeContext.of(runtime.start(settings), described, config.mesh.dc if config else 1)
    jax.config.update("jax_enable_x64", config is not None and config.precision == "fp64")
    first = jax.process_index() == 0
    console = Console(quiet=not first, highlight=False, soft_wrap=True, markup=False)
    console.print(_heading(context))
    dtype = None
    if config is not None:
        dtype = cast("Precision", policy(config.precision).compute_dtype.name)
    with console.status("measuring"):
        figures = probe(
            context,
            described_by=described,
            coordinator=settings.coordinator if len(context.processes) > 1 else None,
            checks=[check for check in CHECKS if check in command.checks],
            streams=sorted(set(command.streams)),
            dtype=dtype,
        )
    if config is not None and "stages" in command.checks:
        with console.status("measuring the pieces of the model"):
            times = _stage_times(config, context)
        figures = figures.model_copy(update={"stage_times": times})
    show(figures, console)
    if first:
        _write(command, context, figures, console)
    console.print("slow: " + "; ".join(figures.flagged) if figures.flagged else "nothing is slow")
    runtime.finish()
    return UNHEALTHY if figures.flagged and first else 0


def _stage_times(config: "RunConfig", context: "ProbeContext") -> "StageTimes":
    from geojax.cli.simulated_pipeline import microbatch_sequences
    from geojax.probe.stages import measured_stages, stage_mesh
    from geojax.step.config_plan import plan_without_pipeline

    sizes = config.mesh
    mesh = stage_mesh(
        context, expert=sizes.expert, context_parallel=sizes.context, tensor=sizes.tensor
    )
    return measured_stages(
        config.model,
        plan_without_pipeline(config, mesh),
        context,
        sequences=microbatch_sequences(config),
        sequence_length=config.batch.sequence_length,
    )


def _processes(simulate: int | None, config: "RunConfig | None") -> "ProcessSettings":
    from geojax.job.cluster_env import VARIABLES
    from geojax.runtime import ProcessSettings

    # A launcher that spreads a job over more processes says how many devices each simulates.
    if (
        simulate is None
        and config is not None
        and not os.environ.get(VARIABLES["simulated_devices"])
    ):
        simulate = config.simulate_devices
    return ProcessSettings(simulated_devices=simulate)


def _heading(context: "ProbeContext") -> str:
    topology = context.topology
    sites = ", ".join(
        f"{site.name} ({site.hosts} x {site.accelerators_per_host} {site.accelerator.name})"
        for site in topology.sites
    )
    count = len(context.processes)
    heading = f"{count} process{'es' if count > 1 else ''}; {sites}"
    if count == 1 and len(topology.sites) > 1:
        heading += (
            "; the sites are simulated in one process, so nothing crosses a link between them"
        )
    return heading


def _write(
    command: ProbeCommand, context: "ProbeContext", figures: "Figures", console: Console
) -> None:
    from geojax.probe import measured_topology, save_topology

    if command.output is not None:
        topology = measured_topology(context.topology, figures)
        save_topology(topology, command.output, _remarks(context, figures))
        console.print(f"{command.output}: the topology")
    if command.stage_times is not None:
        assert figures.stage_times is not None, "the stage times must have been measured"
        figures.stage_times.save(command.stage_times)
        console.print(f"{command.stage_times}: the stage times")
    if command.json_file is not None:
        try:
            command.json_file.write_text(figures.model_dump_json(indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{command.json_file}: cannot be written ({error.strerror})") from None
        console.print(f"{command.json_file}: all figures")


def _remarks(context: "ProbeContext", figures: "Figures") -> list[str]:
    """List remarks on the topology's numbers for its readers."""
    remarks = [f"Measured by geojax probe, on {len(context.processes)} process(es)."]
    if figures.links and max(site.hosts for site in context.topology.sites) > 1:
        remarks.append("Links: between one host of each site; together they may carry more.")
    if context.topology.links and not figures.links:
        remarks.append("Links: as described, not measured.")
    if figures.devices and figures.devices[0].kind == "cpu":
        remarks.append("Peaks: what these CPUs reached, one device at a time.")
    return remarks
