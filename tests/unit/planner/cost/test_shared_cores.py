"""Messages between sites of simulated devices, whose cores compute as well."""

import itertools

import pytest

from geojax.accelerators import Accelerator
from geojax.models import ModelConfig
from geojax.planner.cost.calibration import MEASURED
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.predict import predict
from geojax.topology import SharedCores, Topology

MODEL = ModelConfig.load("tiny")
CORES = SharedCores(
    devices_per_core=4,
    update_seconds_per_number=3e-8,
    message_seconds=0.02,
    message_bytes_per_second=10e6,
    processor_seconds_per_byte=2e-9,
    encode_seconds_per_number={"none": 1e-9, "bf16": 3e-9, "int8": 30e-9},
)
DATA = LayoutCandidate.made(
    sequence_length=256,
    microbatches=2,
    mesh={"dc": 2, "data": 4},
    precision="fp32",
    communication={"bucket_bytes": 2**30},
)
STAGE = LayoutCandidate.made(
    sequence_length=256,
    microbatches=8,
    mesh={"dc": 2, "stage": 1, "data": 4},
    dc={"role": "stage"},
    precision="fp32",
)


def topology(cores):
    accelerator = Accelerator(
        name="core", peak_flops_per_second={"float32": 1e11}, memory_bytes_per_second=1e10
    )
    site = {"hosts": 1, "accelerators_per_host": 4, "accelerator": accelerator}
    link = {"sites": ["a", "b"], "round_trip_seconds": "20ms", "bytes_per_second": "1Gbit/s"}
    sites = [{"name": name, "shared_cores": cores, **site} for name in "ab"]
    return Topology.model_validate({"sites": sites, "links": [link]})


def step(layout, cores=CORES, **sections):
    return predict(MODEL, layout.changed(**sections), topology(cores), calibration=MEASURED)


def sums(layout, cores=CORES, **sections):
    return step(layout, cores, **sections).term("gradients between sites")


def test_one_program_exposes_every_message_and_the_work_of_its_format():
    made = sums(DATA)
    numbers = made.bytes / 4
    assert made.exposed_seconds == pytest.approx(
        made.messages * 0.02 + made.bytes / 10e6 + numbers * 1e-9
    )
    compressed = sums(DATA, communication={"gradient_compression": "int8"})
    assert compressed.exposed_seconds == pytest.approx(
        compressed.messages * 0.02 + compressed.bytes / 10e6 + numbers * 30e-9, rel=1e-3
    )


def test_a_link_slower_than_what_was_reached_sets_the_rate():
    fast = CORES.model_copy(update={"message_bytes_per_second": 1e12})
    made = sums(DATA, fast)
    share = 125e6 / 4
    assert made.exposed_seconds == pytest.approx(
        made.messages * 0.02 + made.bytes / share + made.bytes / 4 * 1e-9
    )


def test_islands_pay_each_byte_with_time_of_the_core():
    free = CORES.model_copy(
        update={"processor_seconds_per_byte": 0.0, "encode_seconds_per_number": {"none": 0.0}}
    )
    paid, unpaid = (sums(DATA, cores, dc={"join": "islands"}) for cores in (CORES, free))
    assert paid.exposed_seconds - unpaid.exposed_seconds == pytest.approx(
        4 * paid.bytes * 2e-9 + paid.bytes / 4 * 1e-9
    )


def test_hops_of_one_program_wait_where_no_other_device_of_the_core_computes():
    alone = CORES.model_copy(update={"devices_per_core": 1.0})
    made = step(STAGE, alone).term("hops between sites")
    message = 256 * MODEL.hidden_size * 4
    waits = made.messages * (0.02 + message / 10e6)
    assert made.exposed_seconds == pytest.approx(waits)
    slow = CORES.model_copy(update={"message_seconds": 1.0})
    waits += made.messages * (1.0 - 0.02)
    shared = step(STAGE, slow)
    of_iteration = itertools.takewhile(lambda each: "hops" not in each.name, shared.terms)
    compute = sum(each.exposed_seconds for each in (*of_iteration, shared.term("pipeline bubble")))
    exposed = shared.term("hops between sites").exposed_seconds
    assert exposed == pytest.approx(waits - 3 / 4 * compute)
    short = CORES.model_copy(update={"message_seconds": 1e-3, "message_bytes_per_second": 1e12})
    hidden = step(STAGE, short).term("hops between sites")
    assert hidden.exposed_seconds == pytest.approx(2 * (1e-3 + message / (125e6 / 4)))
    apart = step(STAGE, dc={"join": "islands"}, pipeline={"schedule": "1f1b"}).term(
        "hops between sites"
    )
    assert apart.exposed_seconds < waits


def test_devices_take_turns_in_the_update():
    alone, together = (step(DATA, cores).term("optimizer") for cores in (None, CORES))
    assert together.bytes == alone.bytes
    # Gradient twice, weight and moments there and back, in 32 bits: nothing is cast to fewer.
    assert together.seconds == pytest.approx(together.bytes / 32 * 3e-8)


def test_starts_of_many_programs_take_time():
    slow = CORES.model_copy(update={"program_seconds": 1e-3})
    joined, apart = (step(DATA, slow, dc={"join": join}) for join in ("one_program", "islands"))
    assert joined.term("starts of programs").seconds == pytest.approx(1e-3)
    chunks = 4  # forwards and backwards of two microbatches; reduced, added; scalars and update
    assert apart.term("starts of programs").seconds == pytest.approx(1e-3 * (chunks * (4 + 2) + 3))
    assert step(DATA).term("starts of programs").seconds == pytest.approx(4 * 3e-4)
    split = step(STAGE, slow, dc={"join": "islands"}, pipeline={"schedule": "zero_bubble_h1"})
    assert split.term("starts of programs").seconds == pytest.approx(1e-3 * (3 * 8 + 2 + 3))
