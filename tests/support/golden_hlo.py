"""Fingerprints of the optimized HLO of twenty training configs: what a refactoring must not change.

    python tests/support/golden_hlo.py record before.json
    python tests/support/golden_hlo.py compare before.json
    python tests/support/golden_hlo.py record shipped.json --shipped
    python tests/support/golden_hlo.py traffic

With `--shipped` they are those of two of `configs/`, compiled ahead of time for their H100s, which
takes jax[cuda13].

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

import jax

sys.path[:0] = [str(Path(__file__).resolve().parents[each]) for each in (2, 1)]
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"

from geojax.runtime import simulate_devices

simulate_devices(8)

from support.resolving import step_of
from support.small_models import FAMILIES
from support.step_traffic import by_kind

from geojax.config.run_config import RunConfig
from geojax.hlo import collective_traffic
from geojax.islands.island_plan import (
    island_plan,
    make_site_mesh,
    site_parts,
    site_programs,
)
from geojax.planner.compile_target import CompileTarget
from geojax.planner.compiled_step import CompiledProgram
from geojax.planner.passes import longest_loop
from geojax.planner.resolve.resolve import resolve
from geojax.planner.resolve.traced_run import trace_on, trace_plan
from geojax.settings import validate
from geojax.step.config_plan import make_run_mesh, step_plan
from geojax.train.compiled_run import CompiledRun

REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = ("llama3-8b-2x8", "llama3-70b-2x256")
"""Configs of `configs/` that are compiled for their GPUs."""

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
    "latents-later-tokens": {
        "mesh": {"dc": 2, "data": 2, "tensor": 2},
        **SEQUENCE,
        "model": {
            **MODEL,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "rope_interleave": True,
            "first_k_dense_replace": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "scoring_func": "sigmoid",
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
            "use_router_bias": True,
            "num_nextn_predict_layers": 1,
        },
    },
    "gpt-oss": {
        "mesh": {"dc": 2, "expert": 2, "tensor": 2},
        "model": MIXTURE
        | {
            "use_attention_sinks": True,
            "qkv_bias": True,
            "attention_output_bias": True,
            "swiglu_limit": 7.0,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "moe_bias": True,
        },
        "precision": "bf16",
    },
    "gemma-3": {
        "mesh": {"dc": 2, "data": 2, "tensor": 2},
        "zero": {"stage": 2},
        "model": MODEL
        | {
            "norm": "rmsnorm1p",
            "sandwich_norm": True,
            "hidden_act": "gelu_pytorch_tanh",
            "use_qk_norm": True,
            "query_pre_attn_scalar": 12,
            "rope_local_base_freq": 100.0,
            "scale_embeddings": True,
            "tie_word_embeddings": True,
            "sliding_window": 8,
            "layer_types": [*3 * ["sliding_attention"], "full_attention"],
        },
    },
    "gpt-2": {
        **STAGES,
        "pipeline": {"schedule": "1f1b"},
        "model": {
            **{name: size for name, size in MODEL.items() if name != "num_key_value_heads"},
            **FAMILIES["gpt3"],
        },
    },
    "lora": {
        "mesh": {"dc": 2, "data": 2, "tensor": 2},
        **SEQUENCE,
        "model": MODEL | {"lora": {"rank": 4, "alpha": 8.0}},
        "initial_weights": "weights",
    },
    "muon-experts": {
        "mesh": {"dc": 2, "data": 2, "expert": 2},
        "model": MIXTURE | {"capacity_factor": 1.0, "n_shared_experts": 1},
        "optimizer": {"name": "muon"},
    },
    "ring-selective": {
        "mesh": {"dc": 2, "data": 2, "context": 2},
        "parallelism": {"context_method": "ring"},
        "remat": "selective",
    },
    "islands": {
        "mesh": {"dc": 2, "data": 2, "tensor": 2},
        "dc": {"join": "islands"},
        **SEQUENCE,
        "zero": {"stage": 2},
    },
}
"""What is changed of `COMMON`, by golden; of "islands" the programs of one site are taken."""


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


def config_of(name: str) -> RunConfig:
    return validate(RunConfig, COMMON | CONFIGS[name], "golden")


def compiled_run(config: RunConfig) -> CompiledRun:
    """The training step of a config of one program."""
    mesh = make_run_mesh(config)
    step = resolve(config, config.load_topology(), list(mesh.devices.flat))
    return CompiledRun.build(config, step, step_plan(config, step, mesh))


def programs_of(name: str) -> list[jax.stages.Compiled]:
    """Compile what a golden or a shipped config runs in a step: one program, or those of a site."""
    if name in SHIPPED:
        config = RunConfig.load(REPOSITORY / "configs" / f"{name}.yaml")
        target = CompileTarget.parse(f"h100:{config.mesh.devices}")
        mesh = target.mesh(config.mesh.model_dump(), config.load_topology())
        return [CompiledProgram.of(trace_on(config, mesh)).program]
    config = config_of(name)
    if config.dc.join == "one_program":
        return [compiled_run(config).step_program]
    devices = jax.devices()[: config.mesh.devices // config.mesh.dc]
    resolved = step_of(config, devices)
    plan = island_plan(config, resolved.layout, make_site_mesh(config, devices))
    programs = site_programs(config, site_parts(config, resolved)[0], plan)
    return [traced.lower().compile() for _, traced in programs.traced()]


def print_traffic(name: str) -> None:
    """Print the bytes of each kind of collective, and mark those that the compiler changed."""
    config = config_of(name)
    if config.dc.join == "islands":
        print(f"{name:<22}has no one program; islands count what they send in their messages")
        return
    run = compiled_run(config)
    longest = longest_loop(run.plan)
    compiled = collective_traffic(run.step_program, run.plan.mesh, longest_loop=longest)
    counted, read = by_kind(trace_plan(config, run.plan).traffic), by_kind(compiled)
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
    parser.add_argument("--shipped", action="store_true", help="configs for GPUs, ahead of time")
    arguments = parser.parse_args()
    if arguments.verb == "traffic":
        for name in arguments.only:
            print_traffic(name)
        return 0
    made = {}
    for name in SHIPPED if arguments.shipped else arguments.only:
        text = "\n".join(canonical(program.as_text()) for program in programs_of(name))
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
