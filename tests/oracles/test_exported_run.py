"""A model of transformers, trained on by two sites that hold half of it each, and taken home."""

import io
import json

import numpy as np
import pytest
import torch
from oracle import packed_logits_and_loss
from small_families import save_small_llama
from support.small_runs import losses, prepare_corpus, train, write_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from geojax.cli.main import run as geojax
from geojax.data import Corpus, DataSettings, Loader

PROMPTS = ("1 is", "29 is 5 ")
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folders of the model at the start, of the run, and of its export."""
    folder = tmp_path_factory.mktemp("home")
    save_small_llama(folder / "base", torch.bfloat16, tie_word_embeddings=True)
    path = write_config(
        folder / "run.yaml",
        prepare_corpus(folder),
        simulate_devices=4,
        mesh={"dc": 2, "data": 2},
        dc={"role": "stage"},
        model={"huggingface": str(folder / "base")},
        initial_weights=str(folder / "base"),
        batch={"global_batch_size": 24, "sequence_length": 32, "microbatches": 4},
        sample={"prompts": list(PROMPTS), "max_new_tokens": NEW_TOKENS, "temperature": 0},
    )
    done = train(path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"starting from the weights in {folder / 'base'}" in done.stdout
    return folder


@pytest.fixture(scope="module")
def export(folder):
    output = folder / "export"
    assert geojax(["export", str(folder / "run"), "--output", str(output)]) == 0
    return output


def test_the_first_loss_is_that_of_the_model_it_starts_from(folder):
    corpus = Corpus.open(DataSettings(sources=({"name": "sums", "prepared": folder / "sums"},)))
    loader = Loader(
        corpus,
        sequence_length=32,
        global_batch_size=24,
        sequences=range(24),
        seed=0,
        vocab_size=301,
    )
    batch = {name: torch.from_numpy(np.array(leaf)) for name, leaf in loader.batch(0).items()}
    model = AutoModelForCausalLM.from_pretrained(
        folder / "base", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = packed_logits_and_loss(model, batch)[1].item()
    assert losses(folder / "run")[1] == pytest.approx(expected, rel=1e-5)


def test_transformers_writes_the_same_text(folder, export):
    model, report = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(export)
    texts = []
    for prompt in PROMPTS:
        given = tokenizer(tokenizer.bos_token + prompt, return_tensors="pt")
        written = model.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False)[0]
        texts.append(tokenizer.decode(written, skip_special_tokens=True))
    assert "\n\n".join(texts) + "\n" == (folder / "run" / "sample.txt").read_text()
    special = json.loads((export / "generation_config.json").read_text())
    assert special == {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def test_evaluate_finds_the_validation_loss_of_the_run(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("geojax.runtime.enable_compilation_cache", lambda folder: None)
    judged, run = tmp_path / "judged.json", folder / "run"
    assert len(list(run.glob("checkpoints/*/20"))) == 2, "each site has a folder of its own"
    options = ["--sequences", "24", "--output", str(judged)]
    assert geojax(["evaluate", str(run), *options]) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "loss" not in line][-1]
    results = json.loads(judged.read_text())
    assert results["step"] == logged["step"] == 20
    assert results["texts"]["sums"]["loss"] == pytest.approx(logged["validation/sums"], rel=1e-6)


def test_generate_writes_the_same_text_on_another_mesh(folder, capsys, monkeypatch):
    monkeypatch.setattr("geojax.runtime.enable_compilation_cache", lambda folder: None)
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    options = ["--max-tokens", str(NEW_TOKENS), "--temperature", "0", "--mesh.tensor", "2"]
    assert geojax(["generate", str(folder / "run"), *prompts, *options]) == 0
    expected = (folder / "run" / "sample.txt").read_text() + "\n"
    assert capsys.readouterr().out == expected
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{prompt}\n" for prompt in PROMPTS)))
    assert geojax(["generate", str(folder / "run"), *options, "--batch-size", "1"]) == 0
    assert capsys.readouterr().out == expected


def test_a_missing_half_is_named(folder, export, capsys):
    checkpoints = folder / "run" / "checkpoints"
    second = sorted(path for path in checkpoints.iterdir() if path.is_dir())[1]
    second.rename(folder / second.name)
    try:
        assert geojax(["export", str(folder / "run"), "--output", str(folder / "half")]) == 2
        assert geojax(["generate", str(folder / "run"), "--prompt", "1 is"]) == 2
        assert geojax(["evaluate", str(folder / "run")]) == 2
    finally:
        (folder / second.name).rename(second)
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3
    assert all(f"step 20 lacks the part of site {second.name}" in error for error in errors)
    assert not (folder / "half").exists()
    assert geojax(["export", str(folder / "run"), "--output", str(export)]) == 2
    assert "exists already" in capsys.readouterr().err
