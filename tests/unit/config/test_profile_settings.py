import re

import pytest
from support.small_models import model_of

from geojax.cli.main import run
from geojax.config.profile_settings import ProfileSettings, overrides_of
from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.settings import validate


def test_a_range_of_steps_ends_before_its_second_number():
    assert overrides_of("20:25") == ["--profile.start=20", "--profile.steps=5"]
    assert ProfileSettings(start=20, steps=5).first_and_last == (20, 24)
    assert ProfileSettings().first_and_last is None


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ("20", "--profile: '20' is no range of steps; 20:25 would profile steps 20 to 24"),
        ("20:-1", "--profile: '20:-1' is no range of steps"),
        ("25:20", "--profile: 25:20 has no step from 1 on; 20:25 would"),
        ("20:20", "--profile: 20:20 has no step"),
        ("0:5", "--profile: 0:5 has no step from 1 on"),
    ],
)
def test_what_is_no_range_is_refused(steps, problem, capsys):
    with pytest.raises(UserError, match=re.escape(problem)):
        overrides_of(steps)
    assert run(["train", "configs/quickstart.yaml", "--profile", steps]) == 2
    assert f"error: {problem}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"steps": 6}, "6 steps make a large profile; take at most 5, or set profile.allow_large"),
        ({"processes": [0, 1, 2]}, "3 processes make a large profile; take at most 2"),
        ({"processes": [1, 1]}, "processes [1, 1] name one twice"),
        ({"processes": []}, "processes: "),
        ({"processes": [-1]}, "processes.0: "),
        ({"start": 0}, "start: "),
    ],
)
def test_what_is_no_small_profile_is_refused(settings, problem):
    with pytest.raises(UserError, match=re.escape(problem)):
        validate(ProfileSettings, settings, "run.yaml")


def test_a_large_profile_is_asked_for():
    large = ProfileSettings(start=1, steps=50, processes=(0, 1, 2), allow_large=True)
    assert large.first_and_last == (1, 50)


def test_steps_beyond_the_run_are_refused():
    run = {"run_directory": "unused", "steps": 10, "model": model_of("llama"), "data": {}}
    run |= {"batch": {"global_batch_size": 8, "sequence_length": 32}}
    validate(RunConfig, run | {"profile": {"start": 6}}, "run.yaml")
    with pytest.raises(UserError, match="profile: step 11 is beyond the last of 10 steps; choose"):
        validate(RunConfig, run | {"profile": {"start": 7}}, "run.yaml")
