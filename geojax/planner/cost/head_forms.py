"""The stages that may run the head of a layout, and embed its tokens."""

from geojax.errors import UserError
from geojax.models import AnyModel
from geojax.models.parallel.limits import check_parallelism
from geojax.planner.cost.layout import LayoutCandidate


def open_head_forms(model: AnyModel, layout: LayoutCandidate) -> tuple[str, ...]:
    """Return each `pipeline.head` that a layout leaves open, "last_stage" first."""
    if layout.pipeline.head != "auto":
        return (layout.pipeline.head,)
    if (
        layout.mesh.stage == 1
        or layout.site_shares is not None
        or layout.dc.join != "one_program"
        or model.num_nextn_predict_layers
    ):
        return ("last_stage",)
    if layout.dc.role == "stage":
        return ("last_stage", "positions")
    shared = layout.changed(pipeline={"head": "vocabulary"})
    try:
        check_parallelism(model, shared.model_parallelism, layout.batch.sequence_length)
    except UserError:
        return ("last_stage", "positions")
    return ("last_stage", "positions", "vocabulary")


def with_shared_vocabulary(model: AnyModel, layout: LayoutCandidate) -> LayoutCandidate:
    """Return the layout with the least of embedding and head on a device, if it leaves that open.

    Otherwise it is returned itself: in other forms a device holds whole gradients of both.
    """
    if "vocabulary" not in open_head_forms(model, layout):
        return layout
    return layout.changed(pipeline={"head": "vocabulary"})
