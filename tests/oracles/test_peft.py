"""LoRA against peft: logits and gradients in float64, and a run's adapter taken home."""

import json
import math

import jax
import numpy as np
import pytest
import torch
from lifted import Lifted
from oracle import packed_logits_and_loss
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file
from small_families import FAMILIES, save_small_llama
from support.equality import assert_equal_gradients, gradients_of_step
from support.plans import step_plan_on
from support.small_models import make_batch
from support.small_runs import prepare_corpus, train, write_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from geojax import make_mesh
from geojax.checkpoint.reading.initial_weights import read_weights
from geojax.cli.main import run as geojax
from geojax.models import logits, parameter_shapes
from geojax.models.frozen import combine, frozen_part, mark_frozen, trained_part, unmarked
from geojax.models.huggingface.checkpoint import (
    HuggingFaceWeights,
    family_for,
    model_of,
    read_model_fields,
)
from geojax.models.huggingface.tensor_map import TensorMap
from geojax.models.lora import LORA_A
from geojax.precision import policy
from geojax.step.state import parameter_layouts

MESHES = {"one-device": {}, "dc2-data2-tensor2": {"dc": 2, "data": 2, "tensor": 2}}
TOLERANCE = 1e-10
PROMPTS = ("1 is", "29 is 5 ")
NEW_TOKENS = 12
TARGETS = {"llama": "all-linear", "mixtral": ["q_proj", "v_proj", "o_proj"]}


def adapter_leaves(model, tensor_of):
    """Our tree of adapters, and None elsewhere, of what `tensor_of` says of a name in peft."""
    locations = TensorMap(family_for(model.base), model.base)

    def leaf(path, shape):
        names = [entry.key for entry in path]
        owner, part = ".".join(names[:-1]), "lora_A" if names[-1] == LORA_A else "lora_B"
        stacked = []
        for layer in range(shape.shape[0]):
            module = locations.locate(f"{owner}.kernel", (layer,)).tensor.name
            name = f"base_model.model.{module.removesuffix('.weight')}.{part}.default.weight"
            stacked.append(tensor_of(name).detach().numpy().T)
        return np.stack(stacked)

    shapes = trained_part(mark_frozen(model, parameter_shapes(model)))
    return jax.tree_util.tree_map_with_path(leaf, shapes)


@pytest.mark.parametrize(("name", "rank_stabilized"), [("llama", False), ("mixtral", True)])
def test_logits_and_gradients_are_those_of_peft(name, rank_stabilized, tmp_path):
    torch.manual_seed(0)
    with Lifted():
        base = AutoModelForCausalLM.from_config(
            FAMILIES[name][0], attn_implementation="eager", experts_implementation="eager"
        )
        base.save_pretrained(tmp_path)
        settings = LoraConfig(
            r=3,
            lora_alpha=5,
            use_rslora=rank_stabilized,
            target_modules=TARGETS[name],
            init_lora_weights=False,
        )
        theirs = get_peft_model(base, settings)
        model = model_of(read_model_fields(tmp_path))
        lora = {"rank": 3, "alpha": 5, "target_modules": TARGETS[name]}
        model = model.replace(lora=lora | {"use_rslora": rank_stabilized})
        batch = make_batch(model, rows=8, sequence=12)
        tensors = {key: torch.from_numpy(leaf) for key, leaf in batch.items()}
        expected, loss = packed_logits_and_loss(theirs, tensors)
    loss.backward()
    parameters = dict(theirs.named_parameters())
    trained = {key for key, each in parameters.items() if each.requires_grad}
    taken = set()

    def gradient(key):
        taken.add(key)
        return parameters[key].grad

    with jax.enable_x64(True):
        gradients = adapter_leaves(model, gradient)
        assert taken == trained, "we adapt what peft adapts"
        adapters = adapter_leaves(model, parameters.__getitem__)
        plan = step_plan_on(make_mesh(devices=jax.devices()[:1]), policy("fp64"), zero_stage=0)
        layouts = frozen_part(parameter_layouts(model, plan))
        frozen = read_weights(HuggingFaceWeights(tmp_path, model.base), layouts, plan.mesh)
        weights = unmarked(combine(adapters, frozen))
        ours = np.asarray(jax.jit(lambda *given: logits(*given, model))(weights, batch))
        wanted = expected.detach().numpy()
        assert ours.dtype == wanted.dtype == np.float64
        assert np.abs(ours - wanted).max() <= TOLERANCE * np.abs(wanted).max()
        for axes in MESHES.values():
            mesh = make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)
            plan = step_plan_on(mesh, policy("fp64"), zero_stage=3 if axes else 0)
            found, actual = gradients_of_step(model, weights, batch, None, plan)
            assert abs(float(found) - loss.item()) <= TOLERANCE * loss.item()
            assert_equal_gradients(actual, gradients, TOLERANCE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folders of what is adapted, of the run, and of its two exports."""
    folder = tmp_path_factory.mktemp("adapted")
    save_small_llama(folder / "base")
    path = write_config(
        folder / "run.yaml",
        prepare_corpus(folder),
        simulate_devices=4,
        steps=12,
        mesh={"dc": 2, "data": 2},
        model={
            "huggingface": str(folder / "base"),
            "lora": {"rank": 4, "alpha": 4, "use_rslora": True},
        },
        initial_weights=str(folder / "base"),
        optimizer={"peak_learning_rate": 0.03, "warmup_steps": 2, "ema_decay": 0.5},
        sample={"prompts": list(PROMPTS), "max_new_tokens": NEW_TOKENS, "temperature": 0},
    )
    done = train(path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = str(folder / "run")
    assert geojax(["export", run, "--output", str(folder / "merged")]) == 0
    assert geojax(["export", run, "--output", str(folder / "adapter"), "--adapter"]) == 0
    return folder


def test_a_merged_export_is_what_peft_merges(folder):
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    adapted = PeftModel.from_pretrained(base, folder / "adapter")
    merged = adapted.merge_and_unload().state_dict()
    ours = load_file(folder / "merged" / "model.safetensors")
    before = load_file(folder / "base" / "model.safetensors")
    assert ours.keys() == before.keys() <= merged.keys()
    changed = {name for name in ours if (ours[name] != before[name]).any()}
    assert changed == {name for name in ours if name.endswith("_proj.weight")}
    for name, own in ours.items():
        assert own.dtype == np.float32
        np.testing.assert_allclose(own, merged[name].numpy(), rtol=1e-6, atol=1e-7)


def test_the_merged_export_writes_what_the_run_and_generate_write(folder, capsys, monkeypatch):
    expected = (folder / "run" / "sample.txt").read_text()
    model, report = AutoModelForCausalLM.from_pretrained(
        folder / "merged", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "adapter")
    texts = []
    for prompt in PROMPTS:
        given = tokenizer(tokenizer.bos_token + prompt, return_tensors="pt")
        written = model.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False)[0]
        texts.append(tokenizer.decode(written, skip_special_tokens=True))
    assert "\n\n".join(texts) + "\n" == expected
    monkeypatch.setattr("geojax.runtime.enable_compilation_cache", lambda folder: None)
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    options = ["--max-tokens", str(NEW_TOKENS), "--temperature", "0"]
    capsys.readouterr()
    assert geojax(["generate", str(folder / "run"), *prompts, *options]) == 0
    assert capsys.readouterr().out == expected + "\n"


def test_evaluate_finds_the_validation_loss_of_the_run(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("geojax.runtime.enable_compilation_cache", lambda folder: None)
    judged, run = tmp_path / "judged.json", folder / "run"
    options = ["--step", "10", "--sequences", "24", "--output", str(judged)]
    assert geojax(["evaluate", str(run), *options]) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (logged,) = [line for line in lines if "loss" not in line and line["step"] == 10]
    found = json.loads(judged.read_text())["texts"]["sums"]["loss"]
    assert found == pytest.approx(logged["validation/sums"], rel=1e-5)


def test_other_weights_in_the_place_of_the_adapted_ones_are_refused(folder, capsys):
    base = folder / "base" / "model.safetensors"
    original = base.read_bytes()
    with torch.no_grad():
        other = AutoModelForCausalLM.from_pretrained(folder / "base")
        other.lm_head.weight[0, 0] += 1
        other.save_pretrained(folder / "other")
    try:
        base.write_bytes((folder / "other" / "model.safetensors").read_bytes())
        assert geojax(["export", str(folder / "run"), "--output", str(folder / "wrong")]) == 2
    finally:
        base.write_bytes(original)
    assert "holds other weights than those that the run adapts" in capsys.readouterr().err
    assert not (folder / "wrong").exists()
