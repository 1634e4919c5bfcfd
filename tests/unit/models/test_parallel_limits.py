"""Layouts that cannot work are refused before anything compiles, with the sizes that would."""

import pytest
from model_families import FAMILIES

from geojax.errors import UserError
from geojax.models import ModelConfig
from geojax.models.parallel.limits import check_parallelism
from geojax.models.parallel.parallelism import Parallelism

_LLAMA = FAMILIES["llama"].replace(num_attention_heads=8, intermediate_size=48)


@pytest.mark.parametrize(
    "parallelism",
    [
        Parallelism(),
        Parallelism(tensor=8, sequence=True),
        Parallelism(tensor=2, sequence=True, context=2),
        Parallelism(tensor=2, context=4, context_method="ulysses"),
        Parallelism(context=4, context_method="all_gather"),
        Parallelism(expert=3),
    ],
)
def test_what_divides_is_let_through(parallelism):
    check_parallelism(_LLAMA, parallelism, 48)


@pytest.mark.parametrize(
    ("parallelism", "sequence", "message"),
    [
        (
            Parallelism(tensor=3),
            48,
            "tensor parallelism over 3 ranks: num_attention_heads 8 is not a multiple of it; "
            "tensor can be 1, 2, 4 or 8",
        ),
        (
            Parallelism(context=4),
            20,
            "context parallelism by ring over 4 ranks needs a sequence that is a multiple of 8, "
            "and it is 20; 16 or 24 would work",
        ),
        (
            Parallelism(tensor=4, context=4, context_method="ulysses"),
            16,
            "a context of 1, 2 would work",
        ),
        (
            Parallelism(tensor=4, sequence=True),
            42,
            "sequence parallelism deals out the positions to 4 tensor ranks, so the sequence must "
            "be a multiple of 4, and it is 42; 40 or 44 would work",
        ),
        (
            Parallelism(tensor=4, sequence=True, context=2),
            12,
            "the positions of each of 2 context ranks to 4 tensor ranks, so the sequence must be a "
            "multiple of 8, and it is 12; 8 or 16 would work",
        ),
        (
            Parallelism(tensor=8, sequence=True),
            3,
            "must be a multiple of 8, and it is 3; 8 would work",
        ),
    ],
)
def test_what_does_not_divide_is_refused(parallelism, sequence, message):
    with pytest.raises(UserError) as refusal:
        check_parallelism(_LLAMA, parallelism, sequence)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_every_size_of_a_layer_counts():
    config = ModelConfig(
        num_hidden_layers=1,
        hidden_size=24,
        num_attention_heads=12,
        num_key_value_heads=4,
        intermediate_size=40,
        vocab_size=7,
        max_position_embeddings=8,
    )
    with pytest.raises(
        UserError, match=r"num_key_value_heads 4 is neither .*; tensor can be 1, 2 or 4"
    ):
        check_parallelism(config, Parallelism(tensor=6), 8)
    with pytest.raises(UserError, match=r"intermediate_size 40 is not .*; tensor can be 1, 2 or 4"):
        check_parallelism(config, Parallelism(tensor=12), 8)
    check_parallelism(config, Parallelism(tensor=4), 8)
    mixed = config.replace(num_experts=6, num_experts_per_tok=2)
    with pytest.raises(UserError, match=r"num_experts 6 is not a multiple .* can be 1, 2, 3 or 6"):
        check_parallelism(mixed, Parallelism(expert=4), 8)
