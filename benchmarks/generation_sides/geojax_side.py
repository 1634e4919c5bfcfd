"""The geojax side: what `geojax generate` runs, on a mesh of one device."""

import json
import sys
from pathlib import Path

from protocol import pin_to_cores, serve, time_calls

FOLDER, THREADS = json.loads(sys.argv[1])
FOLDER = Path(FOLDER)
pin_to_cores(THREADS)

import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np

from geojax.checkpoint.reading.initial_weights import read_weights
from geojax.inference import LoadedModel, Sampling, generate
from geojax.inference.loaded_model import serving_mesh, weight_layouts
from geojax.models import ModelConfig
from geojax.models.huggingface.checkpoint import HuggingFaceWeights, read_model_fields

CONFIG = ModelConfig(**read_model_fields(FOLDER))
MESH = serving_mesh(1, 1, 1)
WEIGHTS = read_weights(
    HuggingFaceWeights(FOLDER, CONFIG), weight_layouts(CONFIG, MESH, jnp.float32), MESH
)
MODEL = LoadedModel(CONFIG, MESH, WEIGHTS)


def write(batch: int, prompt: int, new: int) -> list[list[int]]:
    prompts = np.random.default_rng(0).integers(1, CONFIG.vocab_size, (batch, prompt)).tolist()
    return generate(MODEL, prompts, max_new_tokens=new, sampling=Sampling(0), batch_size=batch)


serve(
    {
        "versions": lambda: {"jax": jax.__version__, "numpy": importlib.metadata.version("numpy")},
        "write": write,
        "seconds": lambda **work: time_calls(lambda: write(**work), 1),
    }
)
