import pytest

from geojax.suggestions import did_you_mean, nearest

KEYS = ["optimizer", "evaluation", "batch", "steps", "warmup_steps", "global_batch_size"]


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("optimiser", KEYS, "optimizer"),
        ("global_batch_sizes", KEYS, "global_batch_size"),
        ("warmup", KEYS, "warmup_steps"),
        ("tokenizer", KEYS, None),
        ("attention", KEYS, None),
        ("x" * 100_000, KEYS, None),
        ("H100", ["a100-sxm", "h100-sxm"], "h100-sxm"),
        ("fp8", ["fp32", "fp16", "fp8-current"], "fp8-current"),
        ("trian", ["train", "memory"], "train"),
    ],
)
def test_the_nearest_name_is_one_that_is_like_it(name, known, meant):
    assert nearest(name, known) == meant


def test_without_a_near_name_all_are_listed():
    assert did_you_mean("qqq", ["a", "b"]) == "there are: a, b"
    assert did_you_mean("optimise", KEYS) == "did you mean 'optimizer'?"
