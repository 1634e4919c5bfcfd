"""Seed faults into a copy of geojax, one at a time, and show that the tests of equality fail.

    python tests/equality/seeded_faults.py                 # all; a table of what failed
    python tests/equality/seeded_faults.py "a hop"         # those whose name holds the words

Each fault is a change of one line that a test of equality once caught which these tests replaced.
The exit status is 1 if one is not caught, or if its line is no longer in the source.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
LAYOUTS, FP32 = "tests/equality/test_layouts.py", "tests/equality/test_fp32.py"


class Fault(NamedTuple):
    """A change of one line."""

    name: str
    replaced: str
    """The test file that caught it, or whose test did."""
    source: str
    line: str
    wrong: str
    cases: str
    """Of pytest's -k: where to look first."""
    tests: str = LAYOUTS


FAULTS = (
    Fault(
        "the first microbatch is taken twice, the last one never",
        "step/test_equality.py",
        "step/gradients.py",
        "jax.tree.map(lambda leaf: leaf[:in_loop], microbatches)",
        "jax.tree.map(lambda leaf: leaf[jnp.maximum(jnp.arange(in_loop) - 1, 0)], microbatches)",
        "accumulation",
    ),
    Fault(
        "losses are not summed over context",
        "step/test_drawn_layouts.py",
        "step/update.py",
        'all_reduce(scalars, ("stage", *SHARD_AXES, "context"), ())',
        'all_reduce(scalars, ("stage", *SHARD_AXES), ())',
        "all_gather or ulysses or ring",
    ),
    Fault(
        "fp32 gradients are rounded to bf16 before they are summed",
        "step/test_named_layouts.py",
        "step/grad_reduce.py",
        "    leaves, structure = jax.tree.flatten(gradients)\n",
        "    leaves, structure = jax.tree.flatten(gradients)\n"
        "    leaves = [leaf.astype(jnp.bfloat16).astype(leaf.dtype) for leaf in leaves]\n",
        "",
        FP32,
    ),
    Fault(
        "the loss of modules for later tokens is taken for the experts'",
        "step/test_later_tokens.py",
        "step/update.py",
        '    names = ("mtp_loss", "aux_loss") if "mtp" in mean else ("aux_loss",)\n',
        '    names = ("aux_loss",)\n',
        "deepseek and not fp8 and not islands",
    ),
    Fault(
        "a deferred weight gradient is written over those before",
        "step/test_balanced_experts.py",
        "pipeline/execution/executor.py",
        "        return typed_like(total + leaf.astype(total.dtype), total)\n",
        "        return typed_like(leaf.astype(total.dtype), total)\n",
        "deepseek and branches",
    ),
    Fault(
        "a chunk's early bucket holds the layers of the chunk before",
        "step/test_early_reduce.py",
        "step/early_reduce.py",
        "layers_slice(leaf, jnp.int32(chunk * count), count)",
        "layers_slice(leaf, jnp.int32(max(chunk - 1, 0) * count), count)",
        "interleaved and overlap",
    ),
    Fault(
        "an adapter is sharded over its rank, not over its inputs",
        "step/test_adapter_steps.py",
        "models/layers.py",
        "(inputs, rank), draw_lora_a, axes=(rows, None)",
        "(inputs, rank), draw_lora_a, axes=(None, rows)",
        "adapters and (tensor or sequence)",
    ),
    Fault(
        "an FP8 scale is that of a rank's own part of a tensor",
        "step/test_fp8_layouts.py",
        "precision/linear_matmul.py",
        "return checkpoint_name(lax.pmax(amax, parts), _AMAX) if parts else amax",
        "return checkpoint_name(lax.psum(amax, parts), _AMAX) if parts else amax",
        "fp8-current and (tensor or sequence)",
    ),
    Fault(
        "rounding errors of a message are lost",
        "step/test_error_feedback.py",
        "collectives/wire_format.py",
        "    lost = divided - wire.decode(messages, divided.shape[-1], divided.dtype)\n",
        "    lost = 0.5 * (divided - wire.decode(messages, divided.shape[-1], divided.dtype))\n",
        "int8",
    ),
    Fault(
        "a tick reads the microbatch before its own",
        "pipeline/execution/test_executor.py",
        "pipeline/execution/executor.py",
        "        return layer_slice(self._microbatches, jnp.maximum(number, 0))\n",
        "        return layer_slice(self._microbatches, jnp.maximum(number - 1, 0))\n",
        "1f1b or gpipe",
    ),
    Fault(
        "a reduce-scatter of the sequence is dropped",
        "models/test_tensor_parallel.py",
        "models/parallel/tensor.py",
        '        reduced = lax.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True)\n',
        "        length = x.shape[1] // parallelism.tensor\n"
        '        first = lax.axis_index("tensor") * length\n'
        "        reduced = lax.dynamic_slice_in_dim(x, first, length, 1)\n",
        "sequence",
    ),
    Fault(
        "an expert's capacity counts the runs of context in the wrong order",
        "models/test_moe_layouts.py",
        "models/moe/capacity.py",
        "    firsts = order.reshape(-1, length // runs)[:, 0]",
        "    firsts = order.reshape(-1, length // runs)[::-1, 0]",
        "capacity and (ring or ulysses or all_gather or sequence)",
    ),
    Fault(
        "dropout numbers the rows of a rank from zero",
        "models/test_model_in_shard_map.py",
        "models/transformer.py",
        'jax.random.fold_in(dropout_key, 0), batch["row"], columns, config.dropout)',
        "jax.random.fold_in(dropout_key, 0), jnp.arange(x.shape[0]), columns, config.dropout)",
        "gpt3 and not adapters",
    ),
    Fault(
        "a chunk of an island computes the microbatch before",
        "step/test_forward_backward.py",
        "islands/programs/chunk_passes.py",
        "        return layer_slice(split_microbatches(inputs.batch, self.plan), number)\n",
        "        number = jnp.maximum(number - 1, 0)\n"
        "        return layer_slice(split_microbatches(inputs.batch, self.plan), number)\n",
        "islands and stages",
    ),
    Fault(
        "the tokens of one site alone divide the gradients of all",
        "step/test_site_sums.py",
        "islands/programs/site_sums.py",
        "            functools.reduce(jnp.add, sums),\n",
        "            sums[0],\n",
        "islands and replicas",
    ),
    Fault(
        "a window begins at the chunk of a rank, not at its query",
        "models/test_attention_parts.py",
        "models/attention/context/all_gather.py",
        "False, number * chunk, is_windowed)",
        "False, 0, is_windowed)",
        "gemma and all_gather",
    ),
)


def caught(fault: Fault, folder: Path) -> tuple[bool, str]:
    """Run the tests beside a copy of geojax with a fault; return if one fails, and which."""
    source = folder / "geojax" / fault.source
    text = source.read_text()
    if text.count(fault.line) != 1:
        return False, f"its line is {text.count(fault.line)} times in geojax/{fault.source}"
    source.write_text(text.replace(fault.line, fault.wrong))
    # -P: the copy, not the current folder, is where geojax is looked for.
    command = [sys.executable, "-P", "-m", "pytest", "-x", "-p", "no:cacheprovider", fault.tests]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    run = subprocess.run(
        [*command, "-k", fault.cases] if fault.cases else command,
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    source.write_text(text)
    if run.returncode == 1:
        failed = re.search(r"^(?:FAILED|ERROR) \S+?::(.*?)(?: - |$)", run.stdout, re.MULTILINE)
        return True, failed[1] if failed else "a test"
    return False, f"pytest exits with {run.returncode}: {run.stdout.strip().splitlines()[-1:]}"


def main() -> int:
    """Seed the faults and print what catches them; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="?", default="", help="in the names of the faults to seed")
    chosen = [fault for fault in FAULTS if parser.parse_args().words in fault.name]
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(REPOSITORY / "geojax", folder / "geojax")
        for fault in chosen:
            begun = time.monotonic()
            found, what = caught(fault, folder)
            missed += not found
            word = "caught" if found else "MISSED"
            print(
                f"{word}  {fault.name} ({fault.replaced}), {time.monotonic() - begun:.0f} s: {what}"
            )
            sys.stdout.flush()
    print(f"{len(chosen) - missed} of {len(chosen)} faults caught")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
