"""The order of work of sites that are stages and do not wait for each other."""

import pytest

from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.islands.actions import fetched_ahead, received
from geojax.islands.island_plan import stage_parts
from geojax.islands.stage_lists import stage_lists
from geojax.pipeline import Placement, geopipe, simulate, validate
from geojax.planner.resolve import site_schedule
from geojax.planner.resolve.abstract_site import abstract_programs, most_layer_bytes
from geojax.planner.resolve.pipeline_plan import choose_hop_ticks, costs_of_stages
from geojax.planner.resolve.run_memory import island_memory, offered_bytes
from geojax.planner.resolve.run_stages import chosen_layers
from geojax.planner.resolve.site_schedule import event_schedule

CONFIG = {
    "run_directory": "unused",
    "steps": 10,
    "topology": "configs/topology/two-h100-sites-2x8.yaml",
    "mesh": {"dc": 2, "data": 8},
    "dc": {"role": "stage", "join": "islands"},
    "model": {"preset": "llama3-8b", "num_hidden_layers": 4},
    "data": {"sources": [{"name": "text", "prepared": "unused"}]},
    "batch": {"global_batch_size": 192, "sequence_length": 1024, "microbatches": 24},
    "zero": {"stage": 1},
}


def config(**pipeline):
    return RunConfig.model_validate(CONFIG | {"pipeline": pipeline})


def warmup(schedule):
    return [action.kind.name for action in schedule.orders[0]].index("BACKWARD")


def test_geopipe_runs_ahead_by_the_round_trip_of_the_topology():
    own = config(schedule="geopipe")
    costs = costs_of_stages(own)
    assert costs.hops[0].latency > 0.01
    schedule = event_schedule(own)
    assert schedule.orders == geopipe(24, costs).orders
    assert warmup(schedule) > warmup(event_schedule(config(schedule="1f1b"))) == 2
    assert fetched_ahead(stage_lists(own, event_schedule(own)), 1)[0] >= warmup(schedule)


def test_the_order_is_found_once_for_memory_messages_and_programs(monkeypatch):
    found = []
    make = site_schedule._event_schedule
    monkeypatch.setattr(
        site_schedule, "_event_schedule", lambda *given: found.append(given) or make(*given)
    )
    own = config(schedule="gpipe").model_copy(update={"seed": 12})
    island_memory(own, None)
    offered_bytes(own)
    stage_lists(own, event_schedule(own))
    assert len(found) == 1
    event_schedule(own.model_copy(update={"seed": 13}))
    assert len(found) == 2, "another run has an order of its own"


def test_an_order_by_events_beats_the_order_of_the_tick_table_in_the_same_memory():
    own = config(schedule="latency_hiding", memory_limit=4)
    schedule = event_schedule(own)
    validate(schedule, limit=4)
    in_ticks = choose_hop_ticks(own, chosen_layers(own)).table.schedule
    by_events, by_ticks = (
        simulate(each, costs_of_stages(own)).seconds for each in (schedule, in_ticks)
    )
    assert by_events <= by_ticks


def test_a_stage_holds_the_activations_of_its_schedule_and_messages_ahead():
    gpipe, ahead = (island_memory(config(schedule=name), None) for name in ("gpipe", "1f1b"))
    assert (gpipe.held, ahead.held) == (24, 2)
    held = [each.memory.phases["backward"] for each in (gpipe, ahead)]
    layers, layer = gpipe.programs.part.layers, gpipe.programs.layer_bytes
    assert held[0]["activations"] == 24 * layers * layer.before_backward
    assert held[0]["communication"] > held[1]["communication"]
    for kind in ("master weights", "optimizer moments", "gathered weights"):
        assert held[0][kind] == held[1][kind] > 0


def test_offers_are_limited_to_the_hops_in_flight():
    hop = 1024 * 4096 * 2  # a sequence of a microbatch on each device, in bf16
    for schedule, in_flight in (("1f1b", 2), ("gpipe", 24)):
        for_scalars = offered_bytes(config(schedule=schedule)) - in_flight * hop
        assert 0 < for_scalars <= 1 << 20


def test_virtual_stages_stay_inside_their_site():
    own = config(schedule="interleaved", virtual_stages=2)
    schedule = event_schedule(own)
    assert schedule.placement == Placement.interleaved([1, 1], 2)
    validate(schedule)
    crossing = [each for each in stage_lists(own, event_schedule(own))[1] for _ in received(each)]
    # Activations into chunk 2 alone, and the scalars.
    assert len(crossing) == 24 + 1


def test_without_known_times_hops_count_for_nothing():
    unknown = config(schedule="geopipe").model_copy(update={"topology": None})
    one_ahead = event_schedule(config(schedule="1f1b"))
    assert event_schedule(unknown).orders == one_ahead.orders


def test_too_much_memory_is_refused_in_one_line():
    with pytest.raises(
        UserError, match=r"'geopipe' holds .* latency_hiding keeps within any limit"
    ):
        event_schedule(config(schedule="geopipe", memory_limit=2))


def test_a_limit_in_bytes_is_one_in_microbatches_that_hold_them(monkeypatch):
    own = config(schedule="latency_hiding")
    parts = stage_parts(own.model, chosen_layers(own))
    layer = most_layer_bytes(own, parts)
    # The last stage has fewest layers, and also keeps the stream for the head.
    assert layer == abstract_programs(own, parts[-1]).layer_bytes
    monkeypatch.setattr("geojax.planner.resolve.site_schedule.most_layer_bytes", lambda *_: layer)
    each = max(chosen_layers(own).layers_per_chunk) * layer.before_backward
    limit = 4 * each + each // 2
    within = event_schedule(config(schedule="latency_hiding", memory_limit_bytes=limit))
    in_microbatches = event_schedule(config(schedule="latency_hiding", memory_limit=4))
    assert max(within.most_held(chosen_layers(own).layers_per_chunk, layer.without_split)) <= limit
    assert within.orders[0] == in_microbatches.orders[0]
    both = config(schedule="latency_hiding", memory_limit=3, memory_limit_bytes=limit)
    validate(event_schedule(both), limit=3)
    free = event_schedule(config(schedule="zero_bubble_h2"))
    plenty = config(schedule="zero_bubble_h2", memory_limit_bytes=100 * each)
    assert event_schedule(plenty).orders == free.orders
    needed = (
        r"'geopipe' holds (.*) on a stage where pipeline.memory_limit_bytes is .* \1 would work"
    )
    with pytest.raises(UserError, match=needed):
        event_schedule(config(schedule="geopipe", memory_limit_bytes=limit))
