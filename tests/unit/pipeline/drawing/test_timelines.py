"""What a picture of timelines shows."""

import matplotlib.image
import pytest
from hand_made import SITES, two_stages
from matplotlib.collections import LineCollection, PolyCollection

from geojax.pipeline.drawing.timelines import draw_timelines, save_timelines


def boxes(axes):
    """The corners (start, end, top, bottom) of the idle rows, and those of the work."""
    found = []
    for collection in axes.collections:
        if isinstance(collection, PolyCollection):
            extents = [path.get_extents() for path in collection.get_paths()]
            found.append([(box.x0, box.x1, box.y0, box.y1) for box in extents])
    return found


def test_every_span_is_a_box_in_its_stage_s_row_over_an_idle_one():
    timeline = two_stages()
    (axes,) = draw_timelines([timeline], SITES).axes
    idle, work = boxes(axes)
    assert [box[:2] for box in idle] == [(0, 26), (0, 26)]
    assert [box[:2] for box in work] == [(span.start, span.end) for span in timeline.spans]
    assert [box[2:] for box in work] == [idle[span.stage][2:] for span in timeline.spans]
    assert [text.get_text() for text in axes.texts if text.get_text().isdigit()] == list("00001111")


def test_messages_between_sites_slant_through_the_gap_between_them():
    timeline = two_stages(1)
    (axes,) = draw_timelines([timeline], SITES).axes
    (_, _, _, upper), (_, _, lower, _) = boxes(axes)[0]
    assert lower - upper > 0.5
    lines = [c for c in axes.collections if isinstance(c, LineCollection)]
    forward, backward = ([path.vertices.tolist() for path in c.get_paths()] for c in lines)
    assert forward == [[[1.0, upper], [4.5, lower]]]
    assert backward == [[[7.5, lower], [11.0, upper]]]


def test_stages_of_one_site_lie_close_and_their_messages_are_not_drawn():
    (axes,) = draw_timelines([two_stages(1, link=None)], ("east", "east")).axes
    (_, _, _, upper), (_, _, lower, _) = boxes(axes)[0]
    assert lower - upper < 0.2
    lines = [c for c in axes.collections if isinstance(c, LineCollection)]
    assert not any(collection.get_paths() for collection in lines)


def test_schedules_share_the_time_axis_and_the_legend(tmp_path):
    longer, shorter = two_stages(2), two_stages(1)
    figure = draw_timelines([longer, shorter], SITES)
    upper, lower = figure.axes
    assert upper.get_xlim() == lower.get_xlim() == (0, 26)
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels[:2] == ["F: forward", "B: backward"]  # nothing splits the backward here
    assert "idle (the bubble)" in labels
    assert lower.get_title(loc="left").startswith("one at a time: 13.00 s, bubble 76.9%")


@pytest.mark.parametrize("microbatches", [4, 400])
def test_numbers_are_left_out_where_they_do_not_fit(tmp_path, microbatches):
    save_timelines([two_stages(microbatches)], SITES, tmp_path / "timelines.png")
    (axes,) = draw_timelines([two_stages(microbatches)], SITES).axes
    numbers = [text for text in axes.texts if text.get_text().isdigit()]
    assert len(numbers) == (4 * microbatches if microbatches == 4 else 0)
    assert matplotlib.image.imread(tmp_path / "timelines.png").std() > 0.05
