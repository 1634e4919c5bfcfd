"""The side of transformers: `generate` of a model in PyTorch; it makes and saves the model."""

import json
import sys
from pathlib import Path

from protocol import pin_to_cores, serve, time_calls

FOLDER, THREADS = json.loads(sys.argv[1])
FOLDER = Path(FOLDER)
pin_to_cores(THREADS)

import numpy as np
import torch
import transformers

torch.set_num_threads(THREADS)
torch.manual_seed(0)
CONFIG = transformers.LlamaConfig(**json.loads((FOLDER / "model.json").read_text()))
MODEL = transformers.AutoModelForCausalLM.from_config(CONFIG).eval()
MODEL.save_pretrained(FOLDER)


def write(batch: int, prompt: int, new: int) -> list[list[int]]:
    prompts = np.random.default_rng(0).integers(1, CONFIG.vocab_size, (batch, prompt))
    found = MODEL.generate(torch.from_numpy(prompts), max_new_tokens=new, do_sample=False)
    return found[:, prompt:].tolist()


serve(
    {
        "versions": lambda: {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "write": write,
        "seconds": lambda **work: time_calls(lambda: write(**work), 1),
    }
)
