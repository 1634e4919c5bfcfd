"""Run directories that no run wrote: files by the schema, with faults that a reader must show."""

import json
import math
import random
from pathlib import Path

import yaml

SITES = ("east", "west")
BEGAN = 1_790_000_000.0
STEPS = 2000
KILLED = ((700, 640, 900.0), (1400, 1360, 240.0))
"""Step at which an attempt was killed, step that the next began from, and seconds between them."""
CONFIG = {
    "mesh": {"dc": 2, "stage": 1, "data": 8, "tensor": 4},
    "dc": {"role": "data", "join": "islands"},
    "batch": {"global_batch_size": 512, "sequence_length": 4096, "microbatches": 4},
    "precision": "bf16",
    "communication": {"gradient_compression": "none", "overlap_grad_reduce": True},
    "run_directory": "runs/two-sites",
    "seed": 0,
    "steps": STEPS,
    "model": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "vocab_size": 128256,
    },
    "optimizer": {"name": "adamw", "peak_learning_rate": 3e-4, "warmup_steps": 200},
    "checkpoint": {"interval": 40},
    "watchdog": {"factor": 20.0},
}
PLANNED = {
    "layout": {"mesh": CONFIG["mesh"]},
    "pipeline": None,
    "flops_per_token": 4.8e10,
    "seconds": {"value": 7.1, "source": "cost model", "relative_error": 0.06},
    "bytes_between_sites": {"value": 4.0e9, "source": "messages", "relative_error": None},
    "memory_bytes": {"value": 6.2e10, "source": "phases", "relative_error": 0.08},
    "memory": {"kind": "fits", "line": "62 GB of 80 GB, most in the backward pass"},
    "notes": ["buckets of 256 MB, by the link's round trip"],
    "origin": {
        "geojax": "0.1.0",
        "devices": [{"kind": "NVIDIA H100 80GB HBM3", "count": 32, "processes": 4}] * 2,
        "topology": {
            "links": [
                {
                    "sites": list(SITES),
                    "round_trip_seconds": 0.021,
                    "bytes_per_second": 1.25e9,
                    "reverse_bytes_per_second": None,
                }
            ]
        },
        "config": CONFIG,
    },
}


class _Writer:
    """The state of the clock, and the lines so far."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.clock = BEGAN
        self.metrics: list[dict] = []
        self.events: list[dict] = []
        self.attempts: list[dict] = []
        self.tokens = 0

    def event(self, step: int, kind: str, text: str, **more: object) -> None:
        event = {"time": round(self.clock, 3), "step": step, "kind": kind, "text": text}
        self.events.append(event | more)


def write_run(folder: Path, *, steps: int = STEPS, seed: int = 0, islands: bool = True) -> Path:
    """Write a run of two sites: two kills, a slow link, spikes and a failed save.

    Args:
        folder: the run's directory.
        steps: as many as the run has done, of `STEPS`.
        seed: of the noise.
        islands: a directory for each site; else the run's own.
    """
    writer = _Writer(random.Random(seed))
    first = 0
    kills = [kill for kill in KILLED if kill[0] < steps]
    for attempt, (last, resumed, pause) in enumerate([*kills, (steps, steps, 0.0)], 1):
        is_last = last == steps
        outcome = ("end" if steps == STEPS else None) if is_last else "killed"
        _attempt(writer, attempt, first, last, outcome)
        if not is_last:
            writer.clock += pause
            kept = [line for line in writer.metrics if line["step"] <= resumed]
            writer.metrics = kept
        first = resumed
    for site in SITES if islands else ("",):
        _write(folder / site, writer, site)
    return folder


def _attempt(writer: _Writer, number: int, first: int, last: int, outcome: str | None) -> None:
    rng, began = writer.rng, writer.clock
    seconds = dict.fromkeys(
        ("starting", "compiling", "productive", "recomputed", "waiting", "data"), 0.0
    )
    seconds |= {"validation": 0.0, "saving": 0.0, "other": 0.0}
    waiting_for = {"west": 0.0}
    kind = "start" if first == 0 else "resume"
    writer.event(first, kind, f"attempt {number} begins at step {first}", attempt=number)
    seconds["starting"] = 55 + 10 * rng.random()
    seconds["compiling"] = 80 + 20 * rng.random()
    writer.clock += seconds["starting"] + seconds["compiling"]
    writer.event(first, "compiled", f"compiled in {seconds['compiling']:.0f} s")
    reached = max((line["step"] for line in writer.metrics), default=0)
    before = KILLED[number - 2][0] if number > 1 else 0
    for step in range(first + 1, last + 1):
        _step(writer, step, seconds, waiting_for, is_again=step <= max(before, reached))
    lost = 20 * rng.random()
    writer.clock += lost
    if outcome == "end":
        writer.event(last, "end", f"done: {last} steps")
    if outcome == "killed":
        writer.event(last, "lost", "lost contact with process 3 of site west (host w2)")
    writer.attempts.append(
        {
            "attempt": number,
            "began": began,
            "ended": writer.clock,
            "first_step": first,
            "last_step": last,
            "seconds": seconds,
            "waiting_for": waiting_for,
            "outcome": outcome,
        }
    )


def _step(writer: _Writer, step: int, seconds: dict, waiting_for: dict, *, is_again: bool) -> None:
    rng = writer.rng
    slow = 900 <= step < 1150
    device = 6.1 + 0.15 * rng.random()
    wait = (2.6 if slow else 0.35) * (0.8 + 0.4 * rng.random())
    data, dispatch = 0.04 + (1.5 if step % 311 == 0 else 0.02) * rng.random(), 0.03
    whole = device + wait + data + dispatch
    save = 4.0 if step % 40 == 0 else 0.0
    validation = 22.0 if step % 200 == 0 else 0.0
    loss = 1.9 + 8.9 * math.exp(-step / 160) + 0.5 * math.exp(-step / 900) + rng.gauss(0, 0.03)
    norm = 0.8 + 4 * math.exp(-step / 60) + 0.1 * rng.random()
    if step in (512, 1277):
        loss, norm = loss + 1.8, norm * 9
        writer.event(step, "spike", f"loss {loss:.2f}, far above its mean of the last steps")
    writer.clock += whole
    writer.tokens += 512 * 4096
    seconds["recomputed" if is_again else "productive"] += device + dispatch
    seconds["waiting"] += wait
    waiting_for["west"] += wait
    seconds["data"] += data
    rate = 512 * 4096 / whole
    line = {
        "step": step,
        "time": round(writer.clock, 3),
        "tokens": writer.tokens,
        "consumed_sequences": step * 512,
        "global_batch_size": 512,
        "loss": loss if step != 1600 else None,
        "gradient_norm": norm,
        "learning_rate": 3e-4 * min(1.0, step / 200),
        "targets": 512 * 4095.0,
        "skipped": float(step >= 1600),
        "seconds": whole,
        "seconds/data": data,
        "seconds/dispatch": dispatch,
        "seconds/device": whole - data - dispatch,
        "seconds/validation": validation,
        "seconds/save": save,
        "tokens_per_second": rate,
        "tokens_per_second_per_device": rate / 64,
        "mfu": rate * 4.8e10 / (64 * 989e12),
        "memory/peak_bytes": 5.9e10 if step > 5 else 4.4e10,
        "memory/limit_bytes": 7.9e10,
        **({"slowest/process": 3, "slowest/seconds": 0.9} if slow else {}),
        "loss_scale": 1.0,
        "link/OTHER/sent_bytes": 4.0e9,
        "link/OTHER/received_bytes": 4.0e9,
        "link/OTHER/bytes_per_second": 1.1e9,
        "link/OTHER/topology_bytes_per_second": 1.25e9,
        "link/OTHER/sent_bytes_per_second": 4.0e9 / whole,
        "link/OTHER/received_bytes_per_second": 4.0e9 / whole,
        "link/OTHER/messages_in_flight": 16,
        "link/OTHER/wait_seconds": wait,
        "link/OTHER/wait_seconds_gradients": 0.9 * wait,
        "link/OTHER/wait_seconds_barrier": 0.1 * wait,
        "link/OTHER/round_trip_seconds": (0.085 if slow else 0.022) + 0.001 * rng.random(),
        "link/OTHER/retransmits": float(rng.randrange(40) if slow else rng.randrange(2)),
        "site/OTHER/loss": loss + 0.01,
        "site/OTHER/seconds": whole,
        "site/OTHER/tokens_per_second": rate / 2,
        "site/OTHER/wait_seconds": 0.2 * wait,
        "site/OTHER/age_seconds": 2.0 + rng.random(),
    }
    if slow and step == 905:
        writer.event(step, "late", "process 3 (site west) is 0.9 s later than the others")
    if step == 960:
        writer.event(step, "replan", "the link to west is slower than planned; buckets of 512 MB")
    if step == 1600:
        writer.event(step, "skipped", "the gradient is not finite; the step is skipped")
    writer.metrics.append(line)
    if save:
        writer.clock += save
        seconds["saving"] += save
        if step == 1200:
            writer.event(step, "failed_save", "no space left on the device of runs/two-sites")
        else:
            writer.event(step, "save", f"step {step} is saved, 96 GB in {save:.0f} s")
    if validation:
        writer.clock += validation
        seconds["validation"] += validation
        for name, more in (("books", 0.08), ("code", -0.35)):
            value = 1.9 + 8.9 * math.exp(-step / 160) + 0.5 * math.exp(-step / 900) + more
            writer.metrics.append({"step": step, f"validation/{name}": value})
        writer.event(step, "validation", f"books {value:.3f}")


def _write(folder: Path, writer: _Writer, site: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    other = "east" if site == "west" else "west"
    lines = (json.dumps(line).replace("/OTHER/", f"/{other}/") for line in writer.metrics)
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(folder / "events.jsonl", map(json.dumps, writer.events))
    over = [each for each in writer.attempts if each["outcome"] is not None]
    write_lines(folder / "goodput.jsonl", map(json.dumps, over))
    for attempt in writer.attempts[len(over) :]:
        (folder / "goodput-now.json").write_text(json.dumps(attempt))
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG, sort_keys=False))
    (folder / "step.yaml").write_text(yaml.safe_dump(PLANNED, sort_keys=False))
    if len(writer.attempts) > 1:
        earlier = CONFIG | {"optimizer": CONFIG["optimizer"] | {"peak_learning_rate": 4e-4}}
        (folder / "config.1.yaml").write_text(yaml.safe_dump(earlier, sort_keys=False))


def write_lines(path: Path, lines: object) -> None:
    path.write_text("".join(f"{line}\n" for line in lines))
