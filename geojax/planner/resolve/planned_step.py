"""The plan of a step that is compiled: what the planner says of the very same layout."""

import dataclasses
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.hlo import Traffic
from geojax.pipeline.schedule import Kind
from geojax.planner.compile_target import CompileTarget
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.execution import GEOJAX
from geojax.planner.cost.layer import LayerTimes
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.memory import layout_memory
from geojax.planner.cost.prediction import Prediction, Term
from geojax.planner.passes import heads_of, layers_of_pass, passes_of
from geojax.planner.resolve.run_layout import planned_layout
from geojax.planner.resolve.run_prediction import predict_run
from geojax.planner.step_traffic import by_ticks, evenly_sent
from geojax.planner.traffic.by_axes import Axes
from geojax.step.plan import StepPlan
from geojax.topology import Topology


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """The figures of a device in one step, as the planner predicts them."""

    product_flops: float | None
    """FLOPs of the products with weights, in ticks without work too; None where a compiled program
    does not show them: of experts, whose kernels are calls, and of split backwards."""
    memory_bytes: float
    """Memory in closed form."""
    sent: Mapping[Axes, Fraction]
    """Bytes that a device is to send, by mesh axes, in a pipeline in the mean over its stages; of
    experts if all are equally busy."""
    most_sent: Mapping[Axes, Fraction]
    """The same with all exchanges that uneven tokens could need."""
    prediction: Prediction | None
    """Step in time; None where peaks or links are not known."""
    untimed: str = ""
    """Reason why there is no prediction."""

    @property
    def _between_sites(self) -> list[Term]:
        terms = self.prediction.terms if self.prediction is not None else ()
        return [term for term in terms if term.network == "between_sites"]

    @property
    def bytes_between_sites(self) -> float:
        """Bytes that a device sends over `dc`."""
        if self.prediction is None:
            return float(sum(count for axes, count in self.sent.items() if "dc" in axes))
        return sum(term.bytes for term in self._between_sites)

    @property
    def messages_between_sites(self) -> float | None:
        """Buckets, or hops there and back; None without a prediction."""
        if self.prediction is None:
            return None
        return sum(term.messages for term in self._between_sites)

    @property
    def hidden_share(self) -> float | None:
        """Share of the time of messages between sites that the compute hides."""
        took = sum(term.seconds for term in self._between_sites)
        exposed = sum(term.exposed_seconds for term in self._between_sites)
        return 1 - exposed / took if took else None

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts, strings and numbers."""
        return {
            "product_flops": self.product_flops,
            "memory_bytes": self.memory_bytes,
            "bytes_sent": _by_names(self.sent),
            "most_bytes_sent": _by_names(self.most_sent),
            "bytes_between_sites": self.bytes_between_sites,
            "messages_between_sites": self.messages_between_sites,
            "hidden_share": self.hidden_share,
            "step_seconds": self.prediction and self.prediction.step_seconds,
        }

    @classmethod
    def of(
        cls, config: RunConfig, plan: StepPlan, traffic: Traffic, target: CompileTarget
    ) -> "PlannedStep":
        """Plan the step that `plan` makes of `config` on the accelerators of `target`.

        Args:
            config: the run.
            plan: how its step runs.
            traffic: the collectives of the step, from `geojax.planner.step_traffic`.
            target: the accelerators.
        """
        layout, by_stages = planned_layout(config, plan), by_ticks(traffic, plan)
        topology = target.topology(config.mesh.dc, config.load_topology())
        memory = layout_memory(
            config.model,
            layout,
            device_bytes=target.accelerator.memory_bytes or math.inf,
            optimizer=config.optimizer,
        )
        prediction, untimed = None, ""
        try:
            prediction = predict_run(config, topology, layout)
        except UserError as error:
            untimed = str(error)
        return cls(
            product_flops=_product_flops(config, layout, plan, topology),
            memory_bytes=memory.bytes,
            sent=evenly_sent(by_stages) if config.model.is_moe else by_stages.by_axes,
            most_sent=by_stages.by_axes,
            prediction=prediction,
            untimed=untimed,
        )


def _by_names(sent: Mapping[Axes, Fraction]) -> dict[str, float]:
    return {",".join(axes): float(count) for axes, count in sent.items()}


def _product_flops(
    config: RunConfig, layout: LayoutCandidate, plan: StepPlan, topology: Topology
) -> float | None:
    """Count FLOPs as the text of a program shows them: each tick has the longest chunk, and head.

    Which chunk a stage works on, and when, is data of the program.
    """
    ticks = plan.tick_program
    if config.model.is_moe or (ticks is not None and ticks.ticks.schedule.split_backward):
        return None
    times = LayerTimes(config.model, layout, topology.sites[0], Calibration(), GEOJAX)
    layers = layers_of_pass(config.model, plan)
    of_layers = layers * (
        passes_of(plan, Kind.FORWARD) * times.forward_flops
        + passes_of(plan, Kind.BACKWARD) * times.backward_flops
    )
    return of_layers + heads_of(plan) * times.head_flops
