"""The config that `geojax config new` writes: one that trains as it is, and says what to change."""

from pathlib import Path

from geojax.models import ModelConfig
from geojax.paths import shown_path

_LENGTH = 256

_TEMPLATE = """\
# Train with: geojax train {file}
# Fit and step time without an accelerator: geojax plan {file}
# All keys: geojax train --help; those of a section: geojax train --help optimizer

# Checkpoints, metrics and the loss curve; the same command goes on from there.
run_directory: runs/{model}
steps: 200

# A preset, or the folder of a model: {{huggingface: models/Llama-3.1-8B}}.
# initial_weights: models/Llama-3.1-8B would start from its weights.
model: {model}

# The product of the axes is the number of devices. Sites are the axis dc, and
# pipeline stages the axis stage: {{dc: 2, stage: 1, data: 4, tensor: 2}}.
mesh: {{data: 1}}
# topology: two-h100-sites        # sites and links: a preset, or a file of geojax probe
# zero: {{stage: 3}}                # FSDP over the ranks of data
# simulate_devices: 8             # CPU devices in place of accelerators, to try a mesh

# Prepare your text with geojax data prepare 'texts/*.jsonl' --output data/texts,
# and name it here: {{name: texts, prepared: data/texts}}.
data:
  sources:
    - {{name: python, builtin: python-stdlib}}

batch:
  global_batch_size: 8            # sequences of a step, over all devices
  sequence_length: {length}
  microbatches: 1                 # gradient accumulation

# CPUs emulate bf16 slowly: fp32 there. On GPUs of Hopper and later: fp8-current.
precision: bf16
# remat: full                     # less memory, more compute

optimizer:
  peak_learning_rate: 1.0e-3
  final_learning_rate: 1.0e-4
  warmup_steps: 20

evaluation: {{interval: 100, sequences: 64}}
checkpoint: {{interval: 100}}
sample: {{prompts: ["def", "import"]}}
"""


def new_config(model: str, file: Path | None) -> str:
    """Return the text of a config of the preset `model`.

    Args:
        model: name of the preset.
        file: the file that the text is for; None: not known.

    Raises:
        UserError: there is no such preset.
    """
    longest = ModelConfig.load(model).max_position_embeddings
    shown = "run.yaml" if file is None else shown_path(file)
    return _TEMPLATE.format(file=shown, model=model, length=min(_LENGTH, longest))
