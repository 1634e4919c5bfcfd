"""A resolved step as a file: what is read is what was written, and what is damaged is refused."""

import pydantic
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from geojax.config.layout import Layout
from geojax.config.layout_sections import BatchSettings
from geojax.errors import UserError
from geojax.pipeline.registry import SCHEDULES, schedule_entry
from geojax.pipeline.simulation.costs import Costs
from geojax.pipeline.tick_tables import tick_table
from geojax.step.resolved import (
    Figure,
    IslandWork,
    MemoryVerdict,
    Origin,
    PipelineOrder,
    RuntimeDevices,
    SmallerStep,
    Step,
)
from geojax.step.step_file import read_step, write_step
from geojax.yaml_syntax import Dumper, parse

CONFIG = {"steps": 3, "model": {"a": 1}}
ORIGIN = Origin(
    geojax="1",
    devices=(RuntimeDevices(kind="cpu", count=8, processes=2),),
    topology=None,
    config=CONFIG,
)


@st.composite
def orders(draw):
    """The work of a drawn pipeline, in ticks or as a schedule."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    stages, microbatches = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    entry = schedule_entry(name)
    chunks = entry.virtual_stages or draw(st.integers(1, 3))
    placement = entry.placement([stages], chunks)
    count = placement.chunks
    table = tick_table(
        name,
        placement,
        stages * microbatches,
        (1,) * (count - 1),
        costs=Costs.uniform(count, 1.0, 1.0, 1.0),
    )
    return PipelineOrder.of(table if draw(st.booleans()) else table.schedule)


LINES = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30)
FIGURES = st.builds(
    Figure,
    value=st.floats(0, 1e12),
    source=LINES,
    relative_error=st.none() | st.floats(0, 1),
)
STEPS = st.builds(
    Step,
    layout=st.builds(
        Layout,
        batch=st.just({"global_batch_size": 64, "sequence_length": 8}),
        remat=st.sampled_from(["none", "selective", "full"]),
        communication=st.fixed_dictionaries(
            {
                "bucket_bytes": st.none() | st.integers(1, 2**40),
                "overlap_grad_reduce": st.booleans(),
                "bucket_layers": st.integers(1, 100),
            }
        ),
    ),
    pipeline=st.none() | orders(),
    sites=st.lists(
        st.builds(
            IslandWork,
            layers=st.just((1, 2)),
            held_microbatches=st.integers(1, 99),
        ),
        max_size=3,
    ).map(tuple),
    seconds=st.none() | FIGURES,
    bytes_between_sites=st.none() | FIGURES,
    memory_bytes=st.none() | FIGURES,
    memory=st.builds(
        MemoryVerdict, kind=st.sampled_from(["unknown", "fits", "may not fit"]), line=LINES
    ),
    notes=st.lists(LINES, max_size=3).map(tuple),
    origin=st.just(ORIGIN),
)


RAMP = {"start": 16, "increment": 16, "sequences": 99}


@st.composite
def ramped_steps(draw):
    """A step of a layout with a ramp, with an order of the stages at each size, or none."""
    batch = {"global_batch_size": 64, "sequence_length": 8, "microbatches": 4, "ramp": RAMP}
    step, has_stages = draw(STEPS), draw(st.booleans())
    placement = schedule_entry("1f1b").placement([2], 1)
    smaller = [
        SmallerStep(
            global_batch_size=size,
            pipeline=(
                PipelineOrder.of(tick_table("1f1b", placement, size // 16, (1,)))
                if has_stages
                else None
            ),
            seconds=draw(st.none() | FIGURES),
        )
        for size in (16, 32, 48)
    ]
    layout = step.layout.model_copy(update={"batch": BatchSettings.model_validate(batch)})
    return step.model_copy(update={"layout": layout, "ramp": tuple(smaller)})


@pytest.mark.parametrize("text", ["0E0", "1e-3", "-2E+5", "3"])
def test_text_that_looks_like_a_number_stays_text(text):
    assert parse(yaml.dump({"line": text}, Dumper=Dumper)) == {"line": text}


@given(STEPS | ramped_steps())
def test_a_step_is_read_as_it_was_written(tmp_path_factory, step):
    path = tmp_path_factory.mktemp("run") / "step.yaml"
    assert write_step(step, path) is None
    read = read_step(path)
    assert read == step
    assert read.digest == step.digest
    if step.pipeline is not None:
        assert read.pipeline.as_schedule == step.pipeline.as_schedule
        if step.pipeline.lock_step is not None:
            assert read.pipeline.as_table == step.pipeline.as_table


def simple(**changes):
    layout = Layout(batch={"global_batch_size": 8, "sequence_length": 8})
    return Step(layout=layout, origin=ORIGIN, **changes)


def test_an_earlier_file_is_kept_beside_the_new_one(tmp_path):
    path = tmp_path / "step.yaml"
    assert read_step(path) is None
    write_step(simple(), path)
    for number in (1, 2):
        assert write_step(simple(notes=(str(number),)), path) == tmp_path / f"step.{number}.yaml"
    assert read_step(path).notes == ("2",)
    assert read_step(tmp_path / "step.2.yaml").notes == ("1",)


@given(orders(), st.data())
def test_a_damaged_order_is_refused(order, data):
    content = order.model_dump()
    stage = data.draw(st.integers(0, len(order.actions) - 1))
    words = order.actions[stage].split()
    place = data.draw(st.integers(0, len(words) - 1))
    words[place] = data.draw(st.sampled_from(["", "F0.99", "B9999.0", "X1.1", "W-1.0", words[0]]))
    changed = " ".join(words)
    if changed == order.actions[stage]:
        return
    content["actions"] = tuple(
        changed if number == stage else each for number, each in enumerate(order.actions)
    )
    with pytest.raises(pydantic.ValidationError):
        PipelineOrder.model_validate(content)


def test_a_damaged_file_is_one_line_that_names_it(tmp_path):
    path = tmp_path / "step.yaml"
    content = simple().model_dump(mode="json") | {"memory": {"kind": "perhaps"}}
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=r"step\.yaml: .*without the file the step is") as raised:
        read_step(path)
    assert "\n" not in str(raised.value)


def test_differences_are_named_by_their_keys():
    other = ORIGIN.model_copy(update={"geojax": "2", "config": {"steps": 4, "model": {"a": 1}}})
    assert ORIGIN.differences(other) == ["geojax", "steps"]
    assert ORIGIN.differences(ORIGIN) == []


@given(ramped_steps())
def test_a_step_of_a_size_has_its_order_and_microbatches(step):
    assert step.of_batch(64) is step
    for size, smaller in zip((16, 32, 48), step.ramp, strict=True):
        sized = step.of_batch(size)
        batch = sized.layout.batch
        assert (batch.global_batch_size, batch.microbatches, batch.ramp) == (size, size // 16, None)
        assert (sized.pipeline, sized.seconds, sized.ramp) == (
            smaller.pipeline,
            smaller.seconds,
            (),
        )
        assert all(work.held_microbatches <= size // 16 for work in sized.sites)
        # What is not the batch is that of the full one.
        assert sized.layout.changed(batch=step.layout.batch) == step.layout
        Step.model_validate(sized.model_dump())


def test_a_ramp_of_other_sizes_or_orders_is_refused():
    batch = {"global_batch_size": 64, "sequence_length": 8, "microbatches": 4, "ramp": RAMP}
    layout = Layout.model_validate({"batch": batch})
    smaller = [SmallerStep(global_batch_size=size) for size in (16, 32, 48)]
    Step(layout=layout, ramp=smaller, origin=ORIGIN)
    with pytest.raises(ValueError, match=r"ramp has other sizes than layout\.batch"):
        Step(layout=layout, ramp=smaller[1:], origin=ORIGIN)
    placement = schedule_entry("1f1b").placement([2], 1)
    order = PipelineOrder.of(tick_table("1f1b", placement, 4, (1,)))
    wrong = [smaller[0].model_copy(update={"pipeline": order}), *smaller[1:]]
    with pytest.raises(ValueError, match="has not the microbatches of its size"):
        Step(layout=layout, ramp=wrong, origin=ORIGIN)
