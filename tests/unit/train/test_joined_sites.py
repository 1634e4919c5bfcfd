"""Settings that the sites of a run must share."""

import pytest

from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.train.joined_sites import shared_settings
from geojax.transport.shared_settings import digests, require_same

CONTENT = {
    "run_directory": "east",
    "steps": 10,
    "model": {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 64,
        "max_position_embeddings": 32,
    },
    "batch": {"global_batch_size": 8, "sequence_length": 32},
    "data": {"sources": [{"name": "sums", "prepared": "/disks/east"}]},
    "mesh": {"dc": 2},
    "dc": {"join": "islands"},
}
OF_A_SITE = {
    "run_directory": "west",
    "data": {"sources": [{"name": "sums", "prepared": "/disks/west"}]},
    "watchdog": {"factor": 5.0},
}


HELD = {"sums": 8 * "0123abcd"}


def compare(changes, held=HELD, step="a digest"):
    own, other = (RunConfig.model_validate(each) for each in (CONTENT, CONTENT | changes))
    there = digests(shared_settings(other, step, held))
    require_same(shared_settings(own, "a digest", HELD), "site east", there, "site west")


def test_paths_may_differ_and_a_digest_fits_beside_an_address():
    compare(OF_A_SITE)
    assert len(digests(shared_settings(RunConfig.model_validate(CONTENT), "a digest", HELD))) < 640


def test_sites_whose_steps_were_resolved_otherwise_are_refused():
    with pytest.raises(UserError, match=r"step\.yaml"):
        compare({}, step="another")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"mesh": {"dc": 2, "tensor": 2}}, "mesh.tensor"),
        ({"model": CONTENT["model"] | {"num_hidden_layers": 3}}, "model.num_hidden_layers"),
        ({"batch": CONTENT["batch"] | {"microbatches": 2}}, "batch.microbatches"),
        ({"precision": "fp32"}, "precision"),
        ({"communication": {"gradient_compression": "int8"}}, "communication.gradient_compression"),
        ({"pipeline": {"memory_limit": 2}}, "pipeline.memory_limit"),
        ({"data": {"sources": [{"name": "other", "prepared": "/disks/east"}]}}, "data.sources"),
    ],
)
def test_the_first_setting_that_differs_is_named(changes, name):
    with pytest.raises(UserError, match=f"site west has another {name} than site east, which has"):
        compare(changes)


def test_sources_prepared_from_other_texts_are_refused():
    told = (
        r"site west has another content of data.sources than site east, which has "
        r'\{"sums": "0123abcd0123"\}; give all sites the same'
    )
    with pytest.raises(UserError, match=told):
        compare(OF_A_SITE, held={"sums": 8 * "0123abce"})
