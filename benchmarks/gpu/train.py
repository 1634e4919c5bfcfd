"""Training on one GPU: geojax in each precision, and a PyTorch peer, one after the other.

    python benchmarks/gpu/train.py

Llama 3 8B's layers, as many as fit, and a model of 1.2B parameters; vocabulary 32k, sequence 4,096.
Each side trains 100 steps on the same text in a process of its own, so that it has the memory to
itself. Without a GPU it is a toy model on the CPU, which only shows that the benchmark works.

Needs jax, flax, optax, numpy and pydantic; the peer needs PyTorch, and is left out without it.
"""

import argparse
import importlib.util
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
REPOSITORY = FOLDER.parent.parent
RESULTS = FOLDER.parent / "results" / "gpu_train.json"

BASE, PEER = "bf16", "torch bf16"
GOALS = {"8B-shaped": 1.3, "1.2B": 1.1}
"""Tokens/s of FP8 with current scaling over those of bf16."""
PEER_GOAL, UTILIZATION_GOAL, LOSS_GOAL = 1.1, 0.5, 0.01

COLUMNS = (
    "",
    "tokens/s",
    "TFLOP/s",
    "MFU",
    "planned",
    "peak GB",
    "planned",
    "last loss",
    "loss off bf16",
    "over bf16",
)
"""A step's seconds and a device's memory as planned are shares of what was measured."""


def ask(script: str, **asked: Any) -> dict[str, Any]:
    """What a side answers, in a process of its own."""
    paths = (str(REPOSITORY), os.environ.get("PYTHONPATH"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # The default leaves a quarter of the memory unused.
    environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [
            sys.executable,
            str(FOLDER / script),
            json.dumps(asked | {"result": str(result)}),
        ]
        code = subprocess.run(command, env=environment, stdout=sys.stderr, check=False).returncode
        if not result.exists():
            return {"problem": f"ended with code {code}; what it said is above"}
        answer: dict[str, Any] = json.loads(result.read_text())
        return answer


def measure(work: dict[str, Any], options: dict[str, str], peak: float | None) -> dict[str, Any]:
    """What came of `work` on a side: geojax with these options, or PyTorch if there are none."""
    script = "geojax_side.py" if options else "torch_side.py"
    made = ask(script, do="measure", **work, **options)
    if "problem" in made:
        return made
    assert made["parameters"] == work["parameters"], "both sides train the same model"
    seconds = statistics.median(made["seconds"])
    tokens_per_second = work["rows"] * work["sequence"] / seconds
    flops_per_second = tokens_per_second * work["flops_per_token"]
    return made | {
        "step_seconds": seconds,
        "tokens_per_second": tokens_per_second,
        "flops_per_second": flops_per_second,
        "utilization": flops_per_second / peak if peak else None,
    }


def loss_difference(made: dict[str, Any], base: dict[str, Any], block: int) -> float:
    """How far two loss curves are apart, as a share: the means of each block of steps compared."""
    pairs = zip(made["losses"], base["losses"], strict=True)
    both = list(pairs)
    differences = []
    for first in range(0, len(both), block):
        ours, theirs = zip(*both[first : first + block], strict=True)
        differences.append(abs(sum(ours) / sum(theirs) - 1))
    return max(differences)


def row(side: str, made: dict[str, Any], base: dict[str, Any] | None, block: int) -> list[str]:
    if "problem" in made:
        return [side, made["problem"]]
    share = made["utilization"]
    cells = [
        side,
        f"{made['tokens_per_second']:,.0f}",
        f"{made['flops_per_second'] / 1e12:.1f}",
        "-" if share is None else f"{share:.1%}",
        _share(made.get("predicted_seconds"), made["step_seconds"]),
        f"{made['peak_bytes'] / 1e9:.1f}" if made["peak_bytes"] else "-",
        _share(made.get("estimated_bytes"), made["peak_bytes"]),
        f"{made['losses'][-1]:.4f}",
    ]
    if base is None:
        return cells
    ratio = made["tokens_per_second"] / base["tokens_per_second"]
    return [*cells, f"{loss_difference(made, base, block):.2%}", f"{ratio:.2f}"]


def _share(planned: float | None, measured: float | None) -> str:
    return f"{planned / measured:.2f}" if planned and measured else "-"


def show(name: str, work: dict[str, Any], results: dict[str, dict[str, Any]]) -> None:
    """A table of one model, and what became of the goals."""
    model = work["model"]
    print(
        f"\n{name}: {work['parameters'] / 1e9:.3g}B parameters, {model['num_hidden_layers']} "
        f"layers, {work['rows']} sequences of {work['sequence']} tokens; MFU is of the bf16 peak"
    )
    base = results.get(BASE)
    if base is not None and "problem" in base:
        base = None
    rows = [list(COLUMNS)]
    rows += [row(side, made, base, work["block"]) for side, made in results.items()]
    ends = [cells for cells in rows if len(cells) > 2]
    widths = [max(len(cells[n]) for cells in ends if n < len(cells)) for n in range(len(COLUMNS))]
    for cells in rows:
        padded = [cells[0].ljust(max(len(other[0]) for other in rows))]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=False)]
        print("  ".join(padded))
    for side, made in results.items():
        if kinds := made.get("kernel_seconds"):
            times = ", ".join(f"{kind} {1e3 * taken:.1f}" for kind, taken in kinds.items())
            print(f"{side}, ms of a step: {times}")
    for line in verdicts(name, results, work["block"]):
        print(line)


def verdicts(name: str, results: dict[str, dict[str, Any]], block: int) -> list[str]:
    """Each goal that can be judged by what was measured."""
    good = {side: made for side, made in results.items() if "problem" not in made}
    base = good.get(BASE)
    if base is None or base["utilization"] is None or name not in GOALS:
        return []
    lines = [_verdict("bf16 MFU", base["utilization"], UTILIZATION_GOAL)]
    if PEER in good:
        ratio = base["tokens_per_second"] / good[PEER]["tokens_per_second"]
        lines.append(_verdict("bf16 tokens/s over PyTorch's", ratio, PEER_GOAL))
    for side, made in good.items():
        if side.startswith("fp8-current"):
            ratio = made["tokens_per_second"] / base["tokens_per_second"]
            lines.append(_verdict(f"{side} tokens/s over bf16's", ratio, GOALS[name]))
            off = loss_difference(made, base, block)
            met = "meets" if off <= LOSS_GOAL else "misses"
            lines.append(f"{side} loss curve off bf16's by {off:.2%}: {met} {LOSS_GOAL:.0%}")
    return lines


def _verdict(what: str, value: float, goal: float) -> str:
    return f"{what} {value:.2f}: {'meets' if value >= goal else 'misses'} {goal:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--toy", action="store_true", help="the toy model, on a GPU too")
    parser.add_argument("--models", nargs="+", help="just these models")
    parser.add_argument("--only", nargs="+", help="just these sides, bf16 or 'torch bf16' say")
    parser.add_argument("--steps", type=int, help="of each side; default: 100, of a toy 20")
    parser.add_argument("--rows", type=int, help="sequences in a step; default: 4")
    parser.add_argument("--layers", type=int, help="of the 8B shape; default: as many as fit")
    parser.add_argument("--remat", default="none", help="geojax's rematerialization")
    parser.add_argument("--scan-layers", default="auto", help="geojax's: auto, true or false")
    parser.add_argument("--output", type=Path, help=f"JSON; default on a GPU: {RESULTS.name}")
    arguments = parser.parse_args()
    if arguments.steps is not None and arguments.steps < 2:
        raise SystemExit("error: --steps must be at least 2, since the first ones compile")

    machine = ask("geojax_side.py", do="describe", toy=arguments.toy, layers=arguments.layers)
    if "problem" in machine:
        raise SystemExit(f"error: geojax does not run here: {machine['problem']}")
    works, sides = machine.pop("works"), machine.pop("sides")
    if importlib.util.find_spec("torch"):
        sides[PEER] = {}
    else:
        print("PyTorch is not installed: there is no peer")
    for what, chosen, known in (
        ("model", arguments.models, works),
        ("side", arguments.only, sides),
    ):
        for name in chosen or ():
            if name not in known:
                raise SystemExit(
                    f"error: no {what} is called '{name}'; there are: {', '.join(known)}"
                )
    toy = "toy" in works
    # Products in float32 would take the whole time; who wants them asks for them.
    usual = [side for side in sides if toy or not side.endswith(" reference")]
    output = arguments.output or (None if toy else RESULTS)
    record: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine,
        "models": {},
    }
    print(f"{machine['device']} ({machine['platform']})")
    for name in arguments.models or works:
        work = works[name] | {"steps": arguments.steps or (20 if toy else 100)}
        work |= {"block": max(1, work["steps"] // 10), "remat": arguments.remat}
        work |= {"scan_layers": arguments.scan_layers}
        work |= {"rows": arguments.rows} if arguments.rows else {}
        results: dict[str, dict[str, Any]] = {}
        record["models"][name] = work | {"results": results}
        for side in arguments.only or usual:
            results[side] = measure(work, sides[side], machine["peak_flops_per_second"])
            if output:  # what was measured stays, should the rest not get its turn
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text(json.dumps(record, indent=1) + "\n")
        show(name, work, results)


if __name__ == "__main__":
    main()
