"""Each family against transformers, in float64: logits, gradients, and the same bytes back."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch
from lifted import Lifted
from oracle import packed_logits_and_loss
from safetensors.numpy import load_file
from small_families import FAMILIES
from support.equality import assert_equal_gradients, gradients_of_step
from support.small_models import make_batch
from transformers import AutoConfig, AutoModelForCausalLM

from geojax import make_mesh
from geojax.checkpoint.reading.initial_weights import read_weights
from geojax.inference import LoadedModel, Sampling, generate
from geojax.models import ModelConfig, logits
from geojax.models.huggingface import CheckpointWriter, HuggingFaceWeights, read_model_fields
from geojax.named_arrays import leaves_by_name
from geojax.precision import policy
from geojax.step.plan import StepPlan
from geojax.step.state import parameter_layouts

MESHES = {"one-device": {}, "dc2-data2-tensor2": {"dc": 2, "data": 2, "tensor": 2}}
TOLERANCE = 1e-10
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [35, 8], [9, 7, 9, 3]]


class Oracle(NamedTuple):
    """A model of transformers and what it computes of a batch."""

    folder: Any
    """Folder with two checkpoints: weights, and gradients in their place."""
    model: ModelConfig
    batch: dict[str, np.ndarray]
    logits: np.ndarray
    loss: float


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    config, casts = FAMILIES[request.param]
    torch.manual_seed(0)
    with Lifted() as lifted:
        theirs = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        )
        biases = dict(score_biases(theirs))
        for parameter in (*theirs.parameters(), *biases.values()):  # not 1 and 0 either
            parameter.data += 0.1 * torch.randn(parameter.shape)
        theirs.save_pretrained(folder / "weights")
        model = ModelConfig(**read_model_fields(folder / "weights"))
        batch = make_batch(model, rows=8, sequence=12)
        tensors = {key: torch.from_numpy(leaf) for key, leaf in batch.items()}
        choices = choices_of_routers(theirs)
        found, loss = packed_logits_and_loss(theirs, tensors)
    prefix = type(theirs).__name__.removesuffix("ForCausalLM")
    assert {place.removeprefix(prefix) for place in lifted.places} == casts
    loss.backward()
    for parameter in theirs.parameters():
        parameter.data = parameter.grad
    real = tensors["segment_ids"].flatten() != 0
    for name, bias in biases.items():  # ours: the excess of each expert's choices
        counts = torch.bincount(choices[name][real].flatten(), minlength=len(bias))
        bias.data = (len(bias) * counts - counts.sum()) / tensors["loss_mask"].double().sum()
    theirs.save_pretrained(folder / "gradients")
    return Oracle(folder, model, batch, found.detach().numpy(), loss.item())


def score_biases(model):
    """The biases of the routers of DeepSeek-V3, which are no parameters, by their module's name."""
    for name, module in model.named_modules():
        if hasattr(module, "e_score_correction_bias"):
            yield name, module.e_score_correction_bias


def choices_of_routers(model):
    """The experts of every token, by the router's name, once the model has run."""
    choices = {}
    for name, _ in score_biases(model):
        model.get_submodule(name).register_forward_hook(
            lambda _, inputs, outputs, name=name: choices.update({name: outputs[2]})
        )
    return choices


def plan_on(axes, zero_stage=1):
    mesh = make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)
    return StepPlan(mesh, policy("fp64"), zero_stage=zero_stage)


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


@pytest.mark.usefixtures("x64")
def test_logits_are_those_of_transformers(oracle):
    weights = read_whole(oracle.folder / "weights", oracle.model)
    ours = np.asarray(jax.jit(lambda *given: logits(*given, oracle.model))(weights, oracle.batch))
    assert ours.dtype == oracle.logits.dtype == np.float64
    assert np.abs(ours - oracle.logits).max() <= TOLERANCE * np.abs(oracle.logits).max()


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


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_gradients_are_those_of_transformers(oracle, axes):
    weights = read_whole(oracle.folder / "weights", oracle.model)
    expected = read_whole(oracle.folder / "gradients", oracle.model)
    loss, gradients = gradients_of_step(oracle.model, weights, oracle.batch, None, plan_on(axes))
    assert abs(float(loss) - oracle.loss) <= TOLERANCE * oracle.loss
    # Softmax does not see what a bias of the keys adds to all scores of a query alike, unless the
    # keys are rotated afterwards.
    learned = oracle.model.position_embedding_type == "learned_absolute"
    zero = ("layers.attention.key.bias",) if learned else ()
    assert_equal_gradients(gradients, expected, TOLERANCE, zero)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("file_bytes", [10**9, 10_000])
def test_a_checkpoint_is_written_as_it_was_read(oracle, tmp_path, file_bytes):
    source = oracle.folder / "weights"
    leaves = leaves_by_name(read_whole(source, oracle.model))
    token_ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
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
    assert {parameter.dtype for parameter in found.parameters()} == {torch.float64}
    assert ModelConfig(**read_model_fields(tmp_path)) == oracle.model
    if oracle.model.sliding_window is None and (
        AutoConfig.from_pretrained(source).model_type == "mistral"
    ):
        assert found.config.model_type == "llama"  # the same but for the window, which is off
        return
    written = AutoConfig.from_pretrained(tmp_path).to_dict()
    for key, value in AutoConfig.from_pretrained(source).to_dict().items():
        if key != "_name_or_path" and (key, value) != ("head_dim", None):
            assert written[key] == value, key
