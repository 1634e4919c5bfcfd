"""The layouts that people choose, in fp32: as near to float64 as one device, leaf by leaf."""

import pytest
from equality.case import Case
from equality.results import errors, errors_of_one_device
from support.distances import assert_no_further_than

REPLICAS = {"family": "gemma", "sites": "2 replicas", "precision": "fp32", "bucket_bytes": 4096}
STAGES = {"family": "gemma", "sites": "2 stages", "precision": "fp32"}
EXPERTS = REPLICAS | {"family": "capacity", "rows": "expert"}
CASES = {
    "ZeRO 1, accumulation": Case(**REPLICAS, rows="data", accumulation="accumulation"),
    "ZeRO 2 beside the backward pass": Case(**REPLICAS, rows="data", zero="2", overlap="overlap"),
    "ZeRO 3 and sequence parallelism": Case(
        **REPLICAS, zero="3", rows="data", tensor="sequence", remat="full"
    ),
    "keys gathered over context": Case(**REPLICAS, context="all_gather", rows="data"),
    "experts and tensor parallelism": Case(**EXPERTS, tensor="sequence"),
    "branch-free through two sites": Case(**STAGES, schedule="branch_free", rows="data"),
    "interleaved in each site": Case(
        **REPLICAS, schedule="interleaved", overlap="overlap", remat="selective"
    ),
    "ZB-V with a split backward": Case(
        **STAGES, schedule="zbv", tensor="sequence", branches="branches"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_as_near_to_float64_as_those_of_one_device(name):
    case = CASES[name]
    assert case.missing is None
    assert_no_further_than(errors_of_one_device(case), errors(case))
