"""Fingerprints of the optimized HLO of twelve training configs: what a refactoring must not change.

    python tests/support/golden_hlo.py record before.json
    python tests/support/golden_hlo.py compare before.json
    python tests/support/golden_hlo.py traffic

Metadata (names of scopes, files and lines) is stripped, and every computation and instruction is
renamed in the order of its appearance, so that moving or renaming Python code changes nothing.
`--keep DIR` also writes the texts, to be compared where two fingerprints differ. `traffic` prints
what a device sends by axes: counted in the step's trace, and read from its compiled program.
"""

import argparse
import hashlib
import json
import os
import re
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[each]) for each in (2, 1)]
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"

from geojax.runtime import simulate_devices

simulate_devices(8)

from support.step_traffic import by_kind

from geojax.config.run_config import RunConfig
from geojax.hlo import collective_traffic
from geojax.planner.passes import longest_loop
from geojax.planner.resolve.resolve import resolve
from geojax.settings import validate
from geojax.step.config_plan import make_run_mesh, step_plan
from geojax.train.compiled_run import CompiledRun

MODEL = {
    "num_hidden_layers": 4,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 80,
    "vocab_size": 101,
    "max_position_embeddings": 64,
}
MIXTURE = MODEL | {"num_experts": 4, "num_experts_per_tok": 2}
COMMON = {
    "run_directory": "runs/golden",
    "steps": 20,
    "simulate_devices": 8,
    "model": MODEL,
    "data": {"sources": [{"name": "text", "prepared": "data/text"}]},
    "batch": {"global_batch_size": 16, "sequence_length": 32, "microbatches": 2},
    "precision": "fp32",
    "communication": {"bucket_bytes": 16384},
}
SEQUENCE = {"parallelism": {"sequence": True}}
STAGES = {"mesh": {"dc": 2, "stage": 2, "data": 2}}
CONFIGS = {
    "plain": {
        "mesh": {"dc": 2, "data": 4},
        "batch": {"global_batch_size": 16, "sequence_length": 32},
    },
    "zero-2": {"mesh": {"dc": 2, "data": 4}, "zero": {"stage": 2}, "precision": "bf16"},
    "zero-3-overlap": {
        "mesh": {"dc": 2, "data": 2, "tensor": 2},
        **SEQUENCE,
        "zero": {"stage": 3},
        "remat": "selective",
        "communication": {"overlap_grad_reduce": True, "bucket_layers": 2},
    },
    "across-sites": {"mesh": {"dc": 2, "data": 4}, "zero": {"stage": 1, "across_sites": True}},
    "int8-overlap": {
        "mesh": {"dc": 2, "data": 4},
        "communication": {"overlap_grad_reduce": True, "gradient_compression": "int8"},
    },
    "bf16-three-sites": {
        "mesh": {"dc": 4, "data": 2},
        "model": MODEL | {"dropout": 0.1},
        "communication": {"gradient_compression": "bf16"},
    },
    "context": {"mesh": {"dc": 2, "data": 2, "context": 2}, "precision": "fp16"},
    "experts": {"mesh": {"dc": 2, "expert": 2, "tensor": 2}, "model": MIXTURE, **SEQUENCE},
    "fp8-zero-3": {"mesh": {"dc": 2, "data": 4}, "zero": {"stage": 3}, "precision": "fp8-delayed"},
    "stages-through-sites": STAGES
    | {
        "dc": {"role": "stage"},
        "pipeline": {"hop_ticks": 2, "schedule": "1f1b"},
        "batch": {"global_batch_size": 16, "sequence_length": 32, "microbatches": 8},
    },
    "stages-in-sites": STAGES
    | {
        "pipeline": {"schedule": "interleaved", "virtual_stages": 2},
        "communication": {"gradient_compression": "int8"},
        "batch": {"global_batch_size": 16, "sequence_length": 32, "microbatches": 4},
    },
    "zero-bubble": {
        "mesh": {"dc": 2, "stage": 2, "tensor": 2},
        **SEQUENCE,
        "dc": {"role": "stage"},
        "pipeline": {"schedule": "zero_bubble_h1"},
        "batch": {"global_batch_size": 16, "sequence_length": 32, "microbatches": 4},
        "precision": "fp8-current",
    },
}


def canonical(text: str) -> str:
    """HLO text without metadata, every name replaced by the number of its first appearance."""
    text = re.sub(r", metadata=\{[^{}]*\}", "", text)
    text = re.sub(r"^HloModule [^,]*,", "HloModule,", text)
    text = re.sub(r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "\n", text)
    text = re.sub(r"/\*[^*]*\*/", "", text)
    numbers: dict[str, str] = {}
    return re.sub(
        r"%[\w.\-]+", lambda match: numbers.setdefault(match[0], f"%{len(numbers)}"), text
    )


def compiled_run(changes: dict) -> CompiledRun:
    """The training step that `changes` to the common config make."""
    config = validate(RunConfig, COMMON | changes, "golden")
    mesh = make_run_mesh(config)
    step = resolve(config, config.load_topology(), list(mesh.devices.flat))
    return CompiledRun.build(config, step, step_plan(config, step, mesh))


def print_traffic(name: str) -> None:
    """Print the bytes of each kind of collective, and mark those that the compiler changed."""
    run = compiled_run(CONFIGS[name])
    longest = longest_loop(run.plan)
    compiled = collective_traffic(run.step_program, run.plan.mesh, longest_loop=longest)
    counted, read = by_kind(run.traffic), by_kind(compiled)
    for axes, kind in sorted(counted | read):
        sent = [float(each.get((axes, kind), (0, False))[0]) for each in (counted, read)]
        mark = "" if sent[0] == sent[1] else "  changed"
        print(f"{name:<22}{','.join(axes):<20}{kind:<20}{sent[0]:>14,.0f}{sent[1]:>14,.0f}{mark}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=["record", "compare", "traffic"])
    parser.add_argument("file", type=Path, nargs="?", default=Path("golden.json"))
    parser.add_argument("--keep", type=Path, help="folder for the texts")
    parser.add_argument("--only", nargs="*", default=list(CONFIGS), choices=list(CONFIGS))
    arguments = parser.parse_args()
    if arguments.verb == "traffic":
        for name in arguments.only:
            print_traffic(name)
        return 0
    made = {}
    for name in arguments.only:
        text = canonical(compiled_run(CONFIGS[name]).step_program.as_text())
        if arguments.keep:
            arguments.keep.mkdir(parents=True, exist_ok=True)
            (arguments.keep / f"{name}.hlo").write_text(text)
        made[name] = hashlib.sha256(text.encode()).hexdigest()
        print(f"{name}: {len(text.splitlines())} lines, {made[name][:12]}", flush=True)
    if arguments.verb == "record":
        arguments.file.write_text(json.dumps(made, indent=2) + "\n")
        return 0
    before = json.loads(arguments.file.read_text())
    changed = [name for name, digest in made.items() if before[name] != digest]
    print(f"changed: {', '.join(changed)}" if changed else f"all {len(made)} are identical")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
