"""What a model of your own is refused for, in a line; nothing is compiled."""

import types

import jax
import jax.numpy as jnp
import pydantic
import pytest
from support.own_models import build, own_model

from geojax.errors import UserError
from geojax.models import OwnModel, check_parallelism, parameter_kinds, parameter_shapes
from geojax.models.own.settings import settings_class
from geojax.models.own.work import flops, layer_products, own_flops
from geojax.models.parallel.parallelism import Parallelism
from geojax.models.transformer import loss_sum, read_by_head
from geojax.named_arrays import leaves_by_name
from geojax.train.resume import module_note
from geojax.trainer import _function_name

SIZES = {"vocab_size": 29, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"module": "support.nothing:build"}, "there is no module support.nothing"),
        ({"module": "support.own_models:built"}, "has no function built; did you mean 'build'?"),
        ({"module": "support.own_models"}, "should match pattern"),
        ({"module": "support.own_models:build", "layer": 3}, "takes no argument 'layer'"),
        ({"module": "support.own_models:build", "rngs": 3}, "takes no argument 'rngs'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(settings, said):
    with pytest.raises(pydantic.ValidationError, match=said.replace("(", r"\(")):
        OwnModel(**settings, **SIZES)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("no_decoder", "returns Linear; a geojax.models.Decoder would do"),
        ("no_blocks", "the Decoder has no blocks"),
        ("batch_statistics", "blocks.0 (Counting) has norm.mean, a BatchStat"),
        ("one_block_twice", "blocks.0.down.bias and blocks.1.down.bias are one parameter"),
        ("whole_numbers", "blocks.0 (Whole) has numbers of int32"),
        (
            "unknown_kind",
            "blocks.0 (Unlike) has rates of shape (3,) with kind='tensor'; matrix and",
        ),
        ("flat_matrix", "blocks.0 (Flat) has rates of shape (3,) with kind='matrix'; matrix and"),
    ],
)
def test_modules_that_cannot_be_trained_are_refused(function, said):
    model = OwnModel(module=f"support.wrong_models:{function}", **SIZES)
    with pytest.raises(UserError) as refused:
        parameter_shapes(model)
    assert said in str(refused.value)
    assert f"support.wrong_models:{function}" in str(refused.value)


def test_a_parameter_is_to_the_optimizer_what_it_declares_or_what_flax_calls_it():
    model = OwnModel(module="support.own_models:rated", **SIZES)
    kind_of = parameter_kinds(model)
    assert {name: kind_of(name) for name in leaves_by_name(parameter_shapes(model))} == {
        "embedding.embedding": "table",
        "layers.rates": "matrix",
        "layers.filter.kernel": "vector",
        "layers.filter.bias": "vector",
        "head.kernel": "table",
        "head.bias": "vector",
    }


def traced_loss(model):
    weights = parameter_shapes(model)
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    rows = jax.ShapeDtypeStruct((2,), jnp.int32)
    names = ("tokens", "targets", "segment_ids", "positions")
    batch = dict.fromkeys(names, tokens) | {"row": rows}
    batch["loss_mask"] = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    return jax.eval_shape(lambda weights, batch: loss_sum(weights, batch, model), weights, batch)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("another_width", "blocks.0 (Narrowing) maps the stream (2, 8, 12) to (2, 8, 3)"),
        ("few_logits", "head (Linear) maps the stream (1, 16, 12) to (1, 16, 28)"),
    ],
)
def test_a_part_with_another_result_is_named(function, said):
    with pytest.raises(UserError) as refused:
        traced_loss(OwnModel(module=f"support.wrong_models:{function}", **SIZES))
    assert said in str(refused.value)


def test_the_class_of_settings_goes_by_module():
    assert settings_class({"module": "a:b"}) is OwnModel
    assert settings_class({"hidden_size": 3}) is not OwnModel


def test_a_pattern_of_blocks_is_one_layer():
    model = own_model("pattern")
    names = leaves_by_name(parameter_shapes(model))
    assert names["layers.1.up.kernel"].shape == (2, 12, 24)
    assert names["embedding.embedding"].shape == (29, 12)
    assert model.num_stacked_layers == 2


def test_a_tied_head_reads_the_embedding_and_declares_its_own():
    model = own_model("tied")
    read = read_by_head(parameter_shapes(model), model)
    assert list(leaves_by_name(read)) == ["embedding.embedding", "head.norm.scale"]
    assert model.head_reads_tokens


def test_parallelism_inside_a_block_is_refused_where_it_is_not_written():
    model = own_model("pattern")
    check_parallelism(model, Parallelism(), 64)
    with pytest.raises(UserError, match=r"tensor parallelism: blocks\.0 \(Mixer\)"):
        check_parallelism(model, Parallelism(tensor=2), 64)
    with pytest.raises(UserError, match=r"expert parallelism: blocks\.0 \(Mixer\)"):
        check_parallelism(model, Parallelism(expert=2), 64)
    wrapped = OwnModel(module="support.own_models:build_of_parts", wrapped=True, **SIZES)
    with pytest.raises(UserError, match=r"sequence parallelism: .* set it to false"):
        check_parallelism(wrapped, Parallelism(tensor=2, sequence=True), 64)


def test_layers_of_geojax_have_its_limits():
    model = OwnModel(module="support.own_models:build_of_parts", experts=4, **SIZES)
    check_parallelism(model, Parallelism(tensor=2, sequence=True, expert=2), 64)
    with pytest.raises(UserError, match="num_attention_heads 2 is not a multiple"):
        check_parallelism(model, Parallelism(tensor=4), 64)
    with pytest.raises(UserError, match="num_experts 4 is not a multiple"):
        check_parallelism(model, Parallelism(expert=3), 64)
    with pytest.raises(UserError, match="multiple of 2"):
        check_parallelism(model, Parallelism(tensor=2, sequence=True), 63)


def test_work_is_read_off_the_trace():
    model = own_model("pattern")
    # A layer has attention of one head and a feed-forward block of twice the width.
    of_token = 4 * 12 * 12 + 2 * 12 * 24 + 2 * 12 * 8
    assert flops(layer_products(model, 3, 8)) == 2 * 3 * 8 * of_token
    assert own_flops(model, 8) == 3 * 2 * (2 * of_token + 12 * 29)


def test_a_function_is_named_where_every_process_finds_it():
    assert _function_name(build) == "support.own_models:build"
    with pytest.raises(UserError, match="no function at the top of a module"):
        _function_name(lambda vocab_size: None)


def test_another_file_of_the_model_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "an_own_model.py"
    module.write_text("from support.own_models import build\n")
    model = OwnModel(module="an_own_model:build", **SIZES)
    config, saved = types.SimpleNamespace(model=model), {"module_digest": model.digest, "step": 7}
    assert module_note(saved, config) is None
    module.write_text("from support.own_models import build as build  # as it was\n")
    said = "changed since step 7: the file of model.module an_own_model:build"
    assert module_note(saved, config) == said
