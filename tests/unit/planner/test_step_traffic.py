"""What a training step sends: as counted in its trace, and nothing across sites in a loop.

Two views of one step. *Written* is the program before the compiler, the same on every backend: each
message, in the dtype that the code names. That is what the trace counts. *Compiled* is what runs:
neighboring sums over the same devices are merged there, so the number of messages says little, and
XLA for CPUs widens 16-bit floats.
"""

import dataclasses
import functools
import json
import math
import os
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import pytest
from support.plans import step_plan_on
from support.small_models import LAYOUTS, ROWS, SEQUENCE, model_of
from support.step_traffic import by_kind

from geojax import make_mesh
from geojax.collectives import BFLOAT16, INT8
from geojax.config.run_config import RunConfig
from geojax.hlo import Traffic, collective_traffic
from geojax.hlo.conventions import all_reduce_bytes
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.planner.resolve.choices import resolved_plan
from geojax.planner.step_traffic import step_traffic
from geojax.precision import policy
from geojax.step.config_plan import make_run_mesh
from geojax.step.plan import SIGNALS, StepPlan
from geojax.step.program import batch_shape, trace_step
from geojax.step.state import state_layouts

REPOSITORY = Path(__file__).parents[3]
GOLDEN = REPOSITORY / "tests" / "golden" / "collectives.json"
REWRITE = "GEOJAX_WRITE_GOLDEN"
HOW_TO_REWRITE = f"{REWRITE}=1 python -m pytest tests/unit/planner/test_step_traffic.py -k golden"


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step before and, where a test asks for it, after the compiler."""

    plan: StepPlan
    layouts: Any
    traced: jax.stages.Traced

    @functools.cached_property
    def program(self) -> jax.stages.Lowered:
        return self.traced.lower()

    @functools.cached_property
    def executable(self) -> jax.stages.Compiled:
        return self.program.compile()

    @functools.cached_property
    def written(self) -> Traffic:
        return collective_traffic(self.program, self.plan.mesh)

    @functools.cached_property
    def compiled(self) -> Traffic:
        return collective_traffic(self.executable, self.plan.mesh)


def traced_step(plan, model, rows, sequence):
    settings = OptimizerSettings()
    optimizer = make_optimizer(settings, steps=10)
    schedule = learning_rate_schedule(settings, steps=10)
    layouts = state_layouts(model, optimizer, plan)
    batch = batch_shape(rows, sequence)
    return Step(plan, layouts, trace_step(layouts, model, plan, optimizer, schedule, batch))


@functools.cache
def step_on(name, family="llama", precision="fp32", accumulated=None, **communication):
    """A small model's step on one of the LAYOUTS, in 4 KB chunks unless said otherwise."""
    axes, microbatches = LAYOUTS[name]
    mesh = make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)
    communication = {"bucket_bytes": 4096} | communication
    plan = step_plan_on(mesh, policy(precision), accumulated or microbatches, **communication)
    return traced_step(plan, model_of(family), ROWS, SEQUENCE)


@functools.cache
def step_of_quickstart():
    """The quickstart's step with the preset `tiny`."""
    config = RunConfig.load(
        REPOSITORY / "configs" / "quickstart.yaml",
        ("--model", "tiny", "--batch.sequence_length", "256"),
    )
    plan = resolved_plan(config, make_run_mesh(config))
    return traced_step(
        plan, config.model, config.batch.global_batch_size, config.batch.sequence_length
    )


WHOLE_LEAVES = functools.partial(step_on, "dc2-data4", bucket_bytes=None)
THREE_MICROBATCHES = functools.partial(step_on, "dc2-data4", family="gpt3", accumulated=3)
BF16 = functools.partial(step_on, "dc2-data4", precision="bf16")
BF16_ON_THE_LINK = functools.partial(BF16, wire_format=BFLOAT16)
INT8_ON_THE_LINK = functools.partial(BF16, wire_format=INT8)

# Most leaves of the small models divide over 2 and 4 ranks; over 3 and 8 they are padded.
STEPS = {name: functools.partial(step_on, name) for name in LAYOUTS} | {
    "quickstart": step_of_quickstart
}
VARIANTS = {
    "three microbatches": THREE_MICROBATCHES,
    "bf16 on the link": BF16_ON_THE_LINK,
    "int8 on the link": INT8_ON_THE_LINK,
}


def number(value):
    return int(value) if value.denominator == 1 else str(value)


def sent_bytes(traffic):
    """What the program sends, by device."""
    inside = across = Fraction(0)
    for collective in traffic.collectives:
        if "dc" in collective.axes:
            assert collective.axes == ("dc",), f"{collective.name} is flat over {collective.axes}"
            across += collective.bytes_sent
        else:
            inside += collective.bytes_sent
    return {"in the site": number(inside), "across sites": number(across)}


@pytest.mark.parametrize("name", [*STEPS, *VARIANTS])
def test_a_step_sends_exactly_what_its_trace_counts(name):
    step = (STEPS | VARIANTS)[name]()
    counted = step_traffic(step.traced, step.plan)
    assert by_kind(step.written) == by_kind(counted)
    if step.plan.policy.compute_dtype.itemsize == 4:
        assert by_kind(step.compiled) == by_kind(counted)


def test_of_what_is_compiled_for_cpus_only_16_bits_are_widened():
    counted = by_kind(step_traffic(BF16().traced, BF16().plan))
    compiled = by_kind(BF16().compiled)
    widened = {key for key in counted if compiled[key] != counted[key]}
    assert widened == {(("data",), "all-gather")}, "weights; gradients are float32"
    for key in widened:
        assert compiled[key][0] == 2 * counted[key][0]


@pytest.mark.parametrize("view", ["written", "compiled"])
def test_a_wire_format_crosses_in_its_own_bytes(view):
    sums = all_reduce_bytes((2 + len(SIGNALS)) * 4, 2)  # these stay in float32
    plain, half, quarter = (
        Fraction(sent_bytes(getattr(step(), view))["across sites"]) - sums
        for step in (BF16, BF16_ON_THE_LINK, INT8_ON_THE_LINK)
    )
    # A site's chunk of at most 4 KB is 1 KB on a rank, of which each site owns 128 numbers.
    assert half / plain == pytest.approx(1 / 2, rel=0.01)
    assert quarter / plain == pytest.approx((1 + 4 / 128) / 4, rel=0.04)


def test_chunks_change_the_number_of_messages_and_not_their_bytes():
    chunks, leaves = STEPS["dc2-data4"]().written, WHOLE_LEAVES().written
    assert sent_bytes(chunks) == sent_bytes(leaves)
    assert len(chunks.over("dc")) > len(leaves.over("dc"))


@pytest.mark.parametrize("view", ["written", "compiled"])
def test_no_loop_holds_a_collective(view):
    traffic = getattr(THREE_MICROBATCHES(), view)
    assert traffic.over("dc"), "gradients cross between sites"
    assert [collective for collective in traffic.collectives if collective.in_loop] == []


def test_that_step_has_loops_that_could_hold_one():
    trip_counts = re.findall(
        r'"known_trip_count":\{"n":"(\d+)"', THREE_MICROBATCHES().executable.as_text()
    )
    assert trip_counts.count("3") >= 3, "microbatches, and the layers forwards and backwards"


@pytest.mark.parametrize("name", ["dc2-data4", "dc2-data2-expert2", "quickstart"])
def test_every_leaf_of_the_state_is_donated(name):
    """Output i of the step is leaf i of the next state, and lies where argument i lay."""
    step = STEPS[name]()
    header = step.executable.as_text().partition("\n")[0]
    lies_where = dict(re.findall(r"\{(\d+)\}: \((\d+), \{\}, (?:may|must)-alias\)", header))
    leaves = jax.tree_util.tree_leaves_with_path(step.layouts)
    copied = [
        jax.tree_util.keystr(path)
        for index, (path, _) in enumerate(leaves)
        if lies_where.get(str(index)) != str(index)
    ]
    assert not copied, "these leaves of the state are copied"


def record(traffic, *, messages):
    """A traffic as the golden file holds it: by axes and kind of collective."""
    return {
        f"{','.join(axes) or 'no axis'}: {kind}": ({"messages": total.count} if messages else {})
        | {"in_loops": total.in_loop, "bytes_sent": number(total.bytes_sent)}
        for axes, kinds in traffic.sums().items()
        for kind, total in kinds.items()
    }


def differences(recorded, now):
    """One line for each entry that is not as it was recorded."""

    def flat(golden):
        return {
            f"{name}, {view}, {collective}": numbers
            for name, views in golden.items()
            for view, collectives in views.items()
            for collective, numbers in collectives.items()
        }

    before, after = flat(recorded), flat(now)
    return [
        f"{entry}\n    recorded  {before.get(entry, 'nothing')}\n    now       "
        f"{after.get(entry, 'nothing')}"
        for entry in before | after
        if before.get(entry) != after.get(entry)
    ]


def test_collectives_of_each_layout_are_those_of_the_golden_file():
    now = {
        name: {
            "written": record(step().written, messages=True),
            "compiled": record(step().compiled, messages=False),
        }
        for name, step in STEPS.items()
    }
    if os.environ.get(REWRITE):
        text = json.dumps(now, indent=2)
        one_line_each = re.sub(r"\{\s+([^{}]+?)\s+\}", _on_one_line, text)
        GOLDEN.write_text(one_line_each + "\n")
    changed = differences(json.loads(GOLDEN.read_text()), now)
    assert not changed, "\n".join(
        [
            f"collectives differ from {GOLDEN.relative_to(REPOSITORY)}:",
            *changed,
            f"If they should, {HOW_TO_REWRITE}",
        ]
    )


def _on_one_line(match):
    return "{" + re.sub(r"\s+", " ", match[1]) + "}"
