"""Time of a step beside its microbatches: weights and gradients between ranks, and the update.

Bytes are those of `geojax.planner.traffic`. `geojax.planner.cost.link_sums` has the sum over sites,
and `geojax.planner.cost.update` the update.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Literal

import jax

from geojax.collectives import wire_format
from geojax.models import AnyModel
from geojax.optim import OptimizerSettings
from geojax.planner.abstract_mesh import abstract_mesh
from geojax.planner.cost.chunks import ChunkWork
from geojax.planner.cost.execution import Execution
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.link_sums import ComputeTimes, LinkSums, link_sums
from geojax.planner.cost.networks import SiteNetworks
from geojax.planner.cost.pipeline import small_program
from geojax.planner.cost.prediction import Network, Term
from geojax.planner.cost.update import update_terms
from geojax.planner.traffic.by_axes import BytesByAxes, add, no_bytes
from geojax.planner.traffic.gradients import predicted_gradient_bytes
from geojax.planner.traffic.weights import predicted_stage_bytes, predicted_weight_bytes
from geojax.precision import policy
from geojax.runtime.platform import GPU
from geojax.step.plan import StepPlan
from geojax.step.stage_layers import StagedLayers, gathers_beside_ticks
from geojax.step.state import parameter_layouts
from geojax.topology import Topology


def step_plan(layout: LayoutCandidate, work: ChunkWork) -> StepPlan:
    """Return the layout as the plan of a step on a mesh without devices.

    Buckets that are left open are as long as a leaf: `_over_link` chooses those that cross a link.
    """
    staged = ticks = None
    if layout.pipeline_stages > 1:
        staged = StagedLayers.of(layout, work.placement, work.layers)
    if staged is not None and layout.mesh.dc > 1 and layout.dc.role == "data":
        ticks = small_program(layout, work.placement, work.chosen_by)
    crosses = layout.mesh.dc > 1 and layout.dc.role == "data"
    late = gathers_beside_ticks(layout, GPU)
    layout = layout.changed(communication={"overlap_param_gather": late})
    communication = layout.communication
    return StepPlan(
        mesh=abstract_mesh(layout.mesh_sizes, platform="gpu"),
        policy=policy(layout.precision),
        layout=layout,
        bucket_bytes=_unless_auto(communication.bucket_bytes, None),
        wire_format=wire_format(communication.gradient_compression) if crosses else None,
        overlap_grad_reduce=communication.overlap_grad_reduce is True,
        bucket_layers=_unless_auto(communication.bucket_layers, 1),
        overlap_scatter=communication.overlap_scatter is True,
        staged_layers=staged,
        tick_program=ticks,
    )


def _unless_auto(given: int | Literal["auto"] | None, auto: Any) -> Any:
    return auto if given == "auto" else given


@dataclasses.dataclass(frozen=True)
class StepReduction:
    """Weights and gradients of a step on their way between ranks, and the update."""

    terms: tuple[Term, ...]
    link_bytes: float = 0.0
    """Bytes that a device sends to the other sites."""
    link_messages: float = 0.0
    buckets: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of the layout's `communication` that were chosen by the link."""


@dataclasses.dataclass(frozen=True)
class StepWork:
    """A step whose microbatches are timed."""

    model: AnyModel
    layout: LayoutCandidate
    topology: Topology
    work: ChunkWork
    networks: SiteNetworks
    """Networks of the site that computes longest."""
    times: ComputeTimes
    execution: Execution
    optimizer: OptimizerSettings

    def reduction(self) -> StepReduction:
        """Time what follows and precedes the microbatches.

        Raises:
            UserError: the topology lacks a link.
        """
        plan = step_plan(self.layout, self.work)
        layouts = parameter_layouts(self.model, plan)
        sums = None
        if self.layout.mesh.dc > 1 and self.layout.dc.role == "data":
            sums = link_sums(self.model, self.layout, self.topology, layouts, plan, self.times)
            plan = sums.plan
        weights = predicted_weight_bytes(self.model, layouts, plan)
        narrower = Fraction(1)
        if self.execution.reduced_itemsize is not None:
            narrower = Fraction(self.execution.reduced_itemsize, plan.policy.reduce_dtype.itemsize)
        gradients = no_bytes()
        add(gradients, predicted_gradient_bytes(self.model, layouts, plan), narrower)
        terms = [
            *self._in_site(layouts, plan, weights, gradients, sums),
            *update_terms(self.model, self.optimizer, layouts, plan, self.networks),
        ]
        if sums is None:
            return StepReduction(tuple(terms))
        terms.append(sums.term)
        gathered = float(sum(sent for axes, sent in weights.items() if "dc" in axes))
        if gathered:
            took = sums.link.seconds(gathered)
            source = (
                "predicted bytes over a device's share of the link (geojax.planner.traffic.weights)"
            )
            name = "weights between sites"
            terms.append(
                Term(name, source, took, took, bytes=gathered, messages=1, network="between_sites")
            )
        sent = sums.messages.bytes + gathered
        return StepReduction(tuple(terms), sent, sums.messages.count, sums.buckets)

    def _in_site(
        self,
        layouts: Any,
        plan: StepPlan,
        weights: BytesByAxes,
        gradients: BytesByAxes,
        sums: LinkSums | None,
    ) -> Iterator[Term]:
        """Yield the gathers of weights and the reductions of gradients inside a site.

        ZeRO 3 gathers a layer's weights while the layer before computes, forwards and backwards,
        and scatters gradients in the same way. Otherwise both happen once a step. Either they
        alternate with the compute, or the program overlaps them chunk by chunk with the first
        forwards and the last backwards. Overlap leaves one chunk exposed, and any excess over a
        window. What `sums` hide of parts that leave early is not exposed.
        """
        leaves = len(jax.tree.leaves(layouts))
        late = self.execution.lock_step and gathers_beside_ticks(self.layout, GPU)
        beside_backward = plan.overlap_grad_reduce and plan.staged_layers is None
        overlaps = {
            "weights": self.execution.overlaps_gather,
            "gradients": self.execution.overlaps_reduction or beside_backward,
        }
        for name, sent in (("weights", weights), ("gradients", gradients)):
            took = total = steps = 0.0
            network: Network = "inside_host"
            for axes, each in sent.items():
                if "dc" in axes or not axes or not each:
                    continue
                group = self.networks.group(axes)
                messages = leaves
                if name == "gradients" and plan.bucket_bytes is not None:
                    messages = math.ceil(each / plan.bucket_bytes)
                took += group.seconds(float(each), messages)
                total += float(each)
                steps += messages * group.steps
                if group.network == "between_hosts":
                    network = group.network
            if not total:
                continue
            exposed, gathers = took, name == "weights"
            if sums is not None and not gathers:
                exposed -= sums.hidden_in_site
            if plan.layout.zero.stage == 3:
                exposed = self._beside_layers(plan, took, gathers=gathers)
            elif overlaps[name]:
                exposed = self._beside_chunks(took, gathers=gathers)
            elif gathers and late:
                of_layers = sum(predicted_stage_bytes(layouts, plan).values())
                exposed = self._beside_first_ticks(took, float(of_layers), total)
            yield Term(
                f"{name} in the site",
                "predicted bytes over the network's bandwidth, and the steps of its rings "
                f"(geojax.planner.traffic.{name})",
                max(took, exposed),
                exposed,
                bytes=total,
                messages=steps,
                network=network,
            )

    def _beside_layers(self, plan: StepPlan, took: float, *, gathers: bool) -> float:
        """Return the time of a collective a layer that the layer beside it does not hide.

        A layer's backward hides its gather first, then the scatter of the layer behind it.
        """
        passes = plan.layout.batch.microbatches * self.model.num_stacked_layers
        both = gathers and plan.layout.zero.reshard_after_forward
        one = took / (passes * (2 if both else 1))
        if gathers:
            hidden = min(one, self.times.layer_forward) + (
                min(one, self.times.layer_backward) if both else 0.0
            )
            return (1 + both) * passes * one - (passes - 1) * hidden
        room = self.times.layer_backward - self.times.layer_forward
        return passes * one - (passes - 1) * min(one, max(0.0, room))

    def _beside_first_ticks(self, took: float, of_layers: float, total: float) -> float:
        """Return the time of gathers that the ticks before a chunk's first do not hide.

        A chunk that comes late is copied to its place once.

        Args:
            took: seconds of all gathers.
            of_layers: bytes of those of layers.
            total: bytes of all.
        """
        others = len(self.work.placement.chunks_of(0)) - 1
        late = of_layers * others / (others + 1)
        site = self.networks.site
        rate = site.accelerator.memory_bytes_per_second or math.inf
        copies = 2 * late / (rate * self.networks.calibration.memory(site.accelerator))
        hidden = took * late / total / others
        window = max(self.work.layers) * self.work.placement.stages * self.times.layer_forward
        return took - others * min(hidden, window) + copies

    def _beside_chunks(self, took: float, *, gathers: bool) -> float:
        """Return the time of a collective a chunk that other chunks' microbatches do not hide."""
        stages = self.work.placement.stages
        if stages > 1:
            parts = len(self.work.placement.chunks_of(0))
            layers = max(self.work.layers) * stages
        else:
            parts, layers = self.model.num_stacked_layers, 1
        window = layers * (self.times.layer_forward if gathers else self.times.layer_backward)
        one = took / parts
        return one + (parts - 1) * max(0.0, one - window)
