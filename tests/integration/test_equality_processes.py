"""Two processes of four devices give the loss and the gradients of one device."""

from pathlib import Path

import pytest
from support.small_runs import finish, start_processes

WORKER = Path(__file__).with_name("equality_worker.py")
# In one start, so that what one device computes is compiled once.
LAYOUTS = ("dc2-data4", "dc2-data2-expert2")


@pytest.mark.parametrize("form", ["psum", "messages"])
def test_loss_and_gradients_equal_those_of_one_device(form):
    """Gradients cross between sites in a psum, as on GPUs, or in messages, as through Gloo."""
    variables = {"GEOJAX_SIMULATE_DEVICES": "4"}
    processes = start_processes(WORKER, form, *LAYOUTS, sites=("west", "east"), **variables)
    printed = finish(*processes)
    assert [process.returncode for process in processes] == [0, 0], "".join(printed)
    lines = [text.strip().splitlines() for text in printed]
    for layout in LAYOUTS:
        assert all(f"{layout} equal" in each for each in lines)
    wires = {line for each in lines for line in each if line.startswith("wires")}
    assert len(wires) == 1, "sites have other bits"
