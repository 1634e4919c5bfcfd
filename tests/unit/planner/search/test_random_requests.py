"""Plans of random models on random sites: the first row is a run, and fits by its trace too."""

import random

import pytest
import yaml

from geojax.cli.planned_runs import PlannedRuns, new_run
from geojax.config.run_config import RunConfig
from geojax.models import ModelConfig
from geojax.optim import OptimizerSettings
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.predict import predict
from geojax.planner.resolve.run_layout import layout_of_run
from geojax.planner.search.advice import why_none
from geojax.planner.search.request import PlanRequest
from geojax.planner.search.search import search
from geojax.topology import Topology

CALIBRATION = Calibration()
SEEDS = (0, 2, 5, 11)
MODELS = ("llama3-8b", "gemma2-9b", "mixtral-8x7b", "gpt-oss-20b", "deepseekmoe-16b", "gpt3-175b")
ACCELERATORS = ("h100-sxm", "a100-sxm-40gb", "a100-sxm-80gb", "h100-nvl")


def drawn_request(seed, folder):
    """A model of a few layers on one to three sites, with files of both."""
    draw = random.Random(seed)
    layers = draw.choice((4, 6, 9, 12))
    model = ModelConfig.load(draw.choice(MODELS)).replace(num_hidden_layers=layers)
    names = ["east", "north", "west"][: draw.randint(1, 3)]
    topology = {
        "name": "drawn",
        "sites": [
            {
                "name": name,
                "hosts": 1,
                "accelerators_per_host": 2 ** draw.randint(1, 3),
                "accelerator": draw.choice(ACCELERATORS),
            }
            for name in names[:1]
        ],
        "links": [
            {
                "sites": [a, b],
                "round_trip_seconds": draw.choice((1e-3, 21e-3)),
                "bytes_per_second": draw.choice((1e9, 5e10)),
            }
            for number, a in enumerate(names)
            for b in names[number + 1 :]
        ],
    }
    topology["sites"] = [topology["sites"][0] | {"name": name} for name in names]
    written = model.model_dump(mode="json", exclude_unset=True)
    for name, content in (("model", written), ("topology", topology)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return PlanRequest(
        model,
        Topology.load(str(folder / "topology.yaml")),
        global_batch_size=draw.choice((16, 24, 64, 96)),
        sequence_length=draw.choice((1024, 2048, 4096)),
        joins=draw.choice((("one_program",), ("islands",), ("one_program", "islands"))),
        compressions=draw.choice((("none",), ("none", "bf16"))),
        optimizer=OptimizerSettings(name=draw.choice(("adamw", "lion"))),
        memory_factor=draw.choice((0.5, 0.75, 1.0)),
    )


def found_for(request):
    def timer(layout):
        return predict(
            request.model,
            layout,
            request.topology,
            calibration=CALIBRATION,
            optimizer=request.optimizer,
        )

    return search(request, timer, CALIBRATION, keep=3)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_first_row_is_a_run_and_fits_by_its_trace(seed, tmp_path):
    request = drawn_request(seed, tmp_path)
    found = found_for(request)
    if not found.best:
        assert "would work" in why_none(request)
        return
    fresh = new_run(tmp_path / "model.yaml", str(tmp_path / "topology.yaml"), request)
    fresh |= {"optimizer": request.optimizer.model_dump(mode="json", exclude_unset=True)}
    runs, path = PlannedRuns(request, fresh, None), tmp_path / "best.yaml"
    best = runs.beginning_with_one_that_fits(found.best).best
    assert runs.write_first_that_fits(best, path) == 1
    assert layout_of_run(RunConfig.load(path)) == best[0].layout
