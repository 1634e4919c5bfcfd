"""Two processes of four devices give the loss and the gradients of one device."""

from pathlib import Path

import pytest
from support.small_runs import finish, start_processes

WORKER = Path(__file__).with_name("equality_worker.py")


@pytest.mark.multiprocess
@pytest.mark.parametrize("layout", ["dc2-data4", "dc2-data2-expert2"])
def test_loss_and_gradients_equal_those_of_one_device(layout):
    processes = start_processes(WORKER, layout, sites=("west", "east"), GEOJAX_SIMULATE_DEVICES="4")
    printed = finish(*processes)
    assert [process.returncode for process in processes] == [0, 0], "".join(printed)
    lines = [text.strip().splitlines() for text in printed]
    assert all(each[-1] == "equal" for each in lines)
    wires = {line for each in lines for line in each if line.startswith("wires")}
    assert len(wires) == 1, "sites have other bits"
