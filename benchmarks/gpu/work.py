"""What both sides of the GPU benchmark do: the models, the text, and how a block of steps is timed.

Reads nothing but numpy, since each side runs where the other's libraries may be missing.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

OPTIMIZER = {
    "peak_learning_rate": 2e-4,
    "final_learning_rate": 2e-4,
    "warmup_steps": 20,
    "beta1": 0.9,
    "beta2": 0.95,
    "epsilon": 1e-8,
    "weight_decay": 0.1,
    "clip_norm": 1.0,
}

LLAMA = {
    "norm": "rmsnorm",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "position_embedding_type": "rope",
    "rope_parameters": {"rope_theta": 500_000.0},
}
"""Of every model here; a model is a mapping that `geojax.models.ModelConfig` takes."""


def fitting_layers(memory_bytes: int) -> int:
    """Layers of the 8B shape that train with 4 rows of 4,096 tokens in such a memory, on each side.

    geojax, compiled for an H100, takes 5.5 GB a layer and 7 GB for the rest. PyTorch keeps more of
    each layer, and copies of its weights in bf16 beside; by reckoning 7 GB are enough for it too.
    """
    layers = int((0.9 * memory_bytes - 10e9) / 7e9)
    return max(1, min(32, layers))


def full_works(memory_bytes: int, layers: int | None) -> dict[str, dict[str, Any]]:
    """The models of a GPU by name, with rows and sequence; `layers` of the first, None: as fit."""
    size = {"rows": 4, "sequence": 4096}
    common = LLAMA | {"vocab_size": 32_000, "max_position_embeddings": 4096}
    layers = layers or fitting_layers(memory_bytes)
    eight = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
    }
    small = {
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
    }
    return {
        "8B-shaped": size | {"model": common | eight | {"num_hidden_layers": layers}},
        "1.2B": size | {"model": common | small | {"num_hidden_layers": 18}},
    }


def toy_works() -> dict[str, dict[str, Any]]:
    """One model that a CPU trains in seconds."""
    sizes = {
        "num_hidden_layers": 3,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 384,
    }
    model = LLAMA | sizes | {"vocab_size": 512, "max_position_embeddings": 128}
    return {"toy": {"rows": 4, "sequence": 128, "model": model}}


def text(work: dict[str, Any], seed: int = 0) -> np.ndarray:
    """Tokens [steps, rows, sequence + 1] with something to learn in them; equal for equal seeds.

    Half of the tokens follow from the one before; the others are drawn, low numbers far more often.
    """
    generator = np.random.default_rng(seed)
    vocabulary, sequence = work["model"]["vocab_size"], work["sequence"]
    following = generator.permutation(vocabulary).astype(np.int32)
    shape = (work["steps"], work["rows"], sequence + 1)
    drawn = (vocabulary * generator.random(shape) ** 4).astype(np.int32)
    follows = generator.random(shape) < 0.5
    tokens = drawn
    for place in range(1, sequence + 1):
        after = following[tokens[..., place - 1]]
        tokens[..., place] = np.where(follows[..., place], after, drawn[..., place])
    return tokens


def time_blocks(
    work: dict[str, Any], step: Callable[[int], Any], read: Callable[[list[Any]], list[float]]
) -> dict[str, Any]:
    """Run all steps, in blocks that the host waits for only at their end.

    Args:
        work: has the number of `steps` and of those in a `block`.
        step: starts the step of that number and returns its loss, perhaps before it is there.
        read: the losses of a block as numbers, which are there once it returns.

    Returns:
        `losses` of all steps, and `seconds` of a step in each block but the first, which compiles.
    """
    losses, seconds = [], []
    for first in range(0, work["steps"], work["block"]):
        numbers = range(first, min(first + work["block"], work["steps"]))
        begin = time.perf_counter()
        losses += read([step(number) for number in numbers])
        seconds.append((time.perf_counter() - begin) / len(numbers))
    return {"losses": losses, "seconds": seconds[1:]}


def peak_resident_bytes() -> int | None:
    """The most memory that this process has held: what a CPU has for a peak; None off Linux."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024


def answer(do: dict[str, Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """Do what the command line asks and write what came of it to the file that it names.

    The one argument is JSON: `do`, one of the names here; `result`, a file; and what else the
    function wants. What goes wrong is an answer too: {"problem": one line}.
    """
    asked = json.loads(sys.argv[1])
    try:
        result = do[asked["do"]](asked)
    except Exception as error:
        traceback.print_exc()
        line = (str(error) or type(error).__name__).strip().splitlines()[0]
        full = "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error)
        result = {"problem": "out of memory" if full else line[:300]}
    Path(asked["result"]).write_text(json.dumps(result))
