"""Each family against transformers, in float64: logits, gradients, and the same bytes back."""

import json
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch
from changed_families import CHANGED_FAMILIES
from lifted import Lifted
from oracle import packed_logits_and_loss
from safetensors.numpy import load_file
from small_families import FAMILIES
from support.equality import assert_equal_gradients, gradients_of_step
from support.plans import step_plan_on
from support.small_models import make_batch
from transformers import AutoConfig, AutoModelForCausalLM

from geojax import make_mesh
from geojax.checkpoint.reading.initial_weights import read_weights
from geojax.inference import LoadedModel, Sampling, generate
from geojax.models import ModelConfig, logits
from geojax.models.families import FAMILIES as KNOWN
from geojax.models.huggingface.checkpoint import HuggingFaceWeights, model_of, read_model_fields
from geojax.models.huggingface.family import REQUIRED, TRAINING_FIELDS
from geojax.models.huggingface.write import CheckpointWriter
from geojax.named_arrays import leaves_by_name
from geojax.precision import policy
from geojax.step.state import parameter_layouts

TOLERANCE = 1e-10
LEFT = {"_name_or_path", "attention_dropout", "attn_pdrop"}
"""Keys that are not written as they were read: where the files are, and rates of training."""
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [35, 8], [9, 7, 9, 3]]


class Oracle(NamedTuple):
    """A model of transformers and what it computes of a batch."""

    folder: Any
    """Folder with two checkpoints: weights, and gradients in their place."""
    model: ModelConfig
    batch: dict[str, np.ndarray]
    logits: np.ndarray
    loss: float
    pad_token_id: int | None
    padding: int | None
    """Token of whose embedding torch takes no gradient from the input."""


MODELS = FAMILIES | CHANGED_FAMILIES
of_all = pytest.mark.parametrize("oracle", MODELS, indirect=True)
of_first = pytest.mark.parametrize("oracle", FAMILIES, indirect=True)


@pytest.fixture(scope="module")
def oracle(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    config, casts = MODELS[request.param]
    torch.manual_seed(0)
    with Lifted() as lifted:
        theirs = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        biases = dict(score_biases(theirs))
        for parameter in (*theirs.parameters(), *biases.values()):  # not 1 and 0 either
            parameter.data += 0.1 * torch.randn(parameter.shape)
        theirs.save_pretrained(folder / "weights")
        model = model_of(read_model_fields(folder / "weights"))
        batch = make_batch(model, rows=8, sequence=12)
        tensors = {key: torch.from_numpy(leaf) for key, leaf in batch.items()}
        choices = choices_of_routers(theirs)
        found, loss = packed_logits_and_loss(theirs, tensors)
    prefix = type(theirs).__name__.removesuffix("ForCausalLM")
    places = {place.removeprefix(prefix) for place in lifted.places}
    # From transformers 5.24 on, a router's weights are made in float32.
    assert places - {"TopkRouter.__init__"} == casts
    loss.backward()
    for parameter in theirs.parameters():
        parameter.data = parameter.grad
    assert (tensors["segment_ids"] != 0).all(), "every token is routed"
    for name, bias in biases.items():  # ours: the excess of each expert's choices
        chosen = torch.cat(choices[name])
        counts = torch.bincount(chosen.flatten(), minlength=len(bias))
        bias.data = (len(bias) * counts - counts.sum()) / tensors["loss_mask"].double().sum()
    theirs.save_pretrained(folder / "gradients")
    padding = theirs.get_input_embeddings().padding_idx
    assert padding is None or (batch["tokens"] == padding).any(), "the token is in the batch"
    logits = found.detach().numpy()
    return Oracle(folder, model, batch, logits, loss.item(), config.pad_token_id, padding)


def score_biases(model):
    """The biases of the routers of DeepSeek-V3, which are no parameters, by their module's name."""
    for name, module in model.named_modules():
        if hasattr(module, "e_score_correction_bias"):
            yield name, module.e_score_correction_bias


def choices_of_routers(model):
    """The experts of every document's tokens, by the router's name, once the model has run."""
    choices = {}
    for name, _ in score_biases(model):
        choices[name] = []
        model.get_submodule(name).register_forward_hook(
            lambda _, inputs, outputs, name=name: choices[name].append(outputs[2])
        )
    return choices


def plan_on(axes, zero_stage=1):
    mesh = make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)
    return step_plan_on(mesh, policy("fp64"), zero_stage=zero_stage)


def read_whole(folder, model):
    """The weights of a checkpoint on one device."""
    plan = plan_on({}, zero_stage=0)
    return read_weights(
        HuggingFaceWeights(folder, model), parameter_layouts(model, plan), plan.mesh
    )


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", CHANGED_FAMILIES)
def test_every_optional_key_is_off_its_default(name, tmp_path):
    config = CHANGED_FAMILIES[name][0]
    config.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    family = next(each for each in KNOWN if each.model_type == config.model_type)
    optional = [key for key in family.keys if key.default is not REQUIRED and key.is_written]
    left = {key.name for key in optional if not TRAINING_FIELDS.isdisjoint(key.fields)}
    left |= {"num_nextn_predict_layers", "rope_local_base_freq", "head_dim", "n_inner"}
    for key in optional:
        default = key.default(content) if callable(key.default) else key.default
        value = content.get(key.name, content.get(key.alias, default))
        assert value != default or key.name in left, key.name


@of_all
@pytest.mark.usefixtures("x64")
def test_logits_are_those_of_transformers(oracle):
    weights = read_whole(oracle.folder / "weights", oracle.model)
    ours = np.asarray(jax.jit(lambda *given: logits(*given, oracle.model))(weights, oracle.batch))
    assert ours.dtype == oracle.logits.dtype == np.float64
    assert np.abs(ours - oracle.logits).max() <= TOLERANCE * np.abs(oracle.logits).max()


@of_first
@pytest.mark.usefixtures("x64")
def test_greedy_generation_is_that_of_transformers(oracle):
    """Token by token, of prompts of different lengths in one batch."""
    with Lifted(), torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(
            oracle.folder / "weights", dtype=torch.float64, experts_implementation="eager"
        )
        expected = []
        for prompt in PROMPTS:
            found = theirs.generate(
                torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None
            )
            expected.append(found[0, len(prompt) :].tolist())
    weights = read_whole(oracle.folder / "weights", oracle.model)
    model = LoadedModel.on_one_device(oracle.model, weights)
    assert generate(model, PROMPTS, max_new_tokens=20, sampling=Sampling(0)) == expected


@of_all
@pytest.mark.usefixtures("x64")
def test_gradients_are_those_of_transformers(oracle):
    check_gradients(oracle, {})


@of_first
@pytest.mark.usefixtures("x64")
def test_gradients_on_a_mesh_are_those_of_transformers(oracle):
    check_gradients(oracle, {"dc": 2, "data": 2, "tensor": 2})


def check_gradients(oracle, axes):
    weights = read_whole(oracle.folder / "weights", oracle.model)
    expected = read_whole(oracle.folder / "gradients", oracle.model)
    loss, gradients = gradients_of_step(oracle.model, weights, oracle.batch, None, plan_on(axes))
    assert abs(float(loss) - oracle.loss) <= TOLERANCE * oracle.loss
    # Softmax does not see what a bias of the keys adds to all scores of a query alike, unless the
    # keys are rotated afterwards.
    learned = oracle.model.position_embedding_type == "learned_absolute"
    zero = ("layers.attention.key.bias",) if learned else ()
    gradients, expected = (without_row(each, oracle.padding) for each in (gradients, expected))
    assert_equal_gradients(gradients, expected, TOLERANCE, zero)


def without_row(gradients, token):
    """Gradients in which a token's row of the embedding is 0: geojax trains it as any other."""
    if token is None:
        return gradients
    table = gradients["embedding"]["tokens"]["embedding"].at[token].set(0)
    embedding = gradients["embedding"] | {"tokens": {"embedding": table}}
    return gradients | {"embedding": embedding}


@of_all
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("file_bytes", [10**9, 10_000])
def test_a_checkpoint_is_written_as_it_was_read(oracle, tmp_path, file_bytes):
    source = oracle.folder / "weights"
    leaves = leaves_by_name(read_whole(source, oracle.model))
    token_ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": oracle.pad_token_id}
    options = {"dtype": "float64", "token_ids": token_ids, "file_bytes": file_bytes}
    with CheckpointWriter(tmp_path, oracle.model, **options) as writer:
        for name in writer.leaves:
            writer.put(name, tuple(map(np.arange, leaves[name].shape)), np.asarray(leaves[name]))
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 1 if file_bytes == 10**9 else len(files) > 2
    ours = {name: array for file in files for name, array in load_file(file).items()}
    theirs = load_file(source / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert (ours[name].shape, ours[name].tobytes()) == (array.shape, array.tobytes()), name
    found, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    # From transformers 5.24 on, a router's weights stay in float32 whatever the file has.
    named = [pair for pair in found.named_parameters() if not pair[0].endswith("mlp.gate.weight")]
    assert {parameter.dtype for _, parameter in named} == {torch.float64}
    assert model_of(read_model_fields(tmp_path)) == oracle.model
    if oracle.model.sliding_window is None and (
        AutoConfig.from_pretrained(source).model_type == "mistral"
    ):
        assert found.config.model_type == "llama"  # the same but for the window, which is off
        return
    written = AutoConfig.from_pretrained(tmp_path).to_dict()
    for key, value in AutoConfig.from_pretrained(source).to_dict().items():
        if key not in LEFT and (key, value) not in (("head_dim", None), ("n_inner", None)):
            assert written[key] == value, key
