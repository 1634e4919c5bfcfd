"""The GPU benchmark, at toy size on a CPU: it runs, with what a bare GPU machine has."""

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "benchmarks" / "gpu" / "train.py"
PERMITTED = {"jax", "jaxlib", "ml_dtypes", "flax", "optax", "numpy", "pydantic", "torch"}

# Imported by every Python process that finds it. (What geojax imports is meant, not what the
# libraries that it imports do: flax imports PyYAML.)
RECORDER = """
import atexit, builtins, os

plain, seen = builtins.__import__, set()

def recording(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__file__") or ""
    own = importer.startswith(os.environ["WATCHED"]) and "site-packages" not in importer
    if level == 0 and own:
        seen.add(name.partition(".")[0])
    return plain(name, globals, locals, fromlist, level)

def write():
    with open(os.environ["IMPORTS"], "a") as file:
        file.write("".join(f"{name}\\n" for name in seen))

builtins.__import__ = recording
atexit.register(write)
"""


def test_it_trains_on_a_cpu_and_imports_nothing_that_a_gpu_machine_lacks(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(RECORDER)
    output = tmp_path / "results" / "out.json"
    result = subprocess.run(
        [sys.executable, SCRIPT, "--toy", "--steps", "6", "--only", "bf16", "--output", output],
        env=os.environ
        | {
            "PYTHONPATH": str(tmp_path),
            "WATCHED": str(REPOSITORY),
            "IMPORTS": str(tmp_path / "imports"),
            "JAX_PLATFORMS": "cpu",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    measured = json.loads(output.read_text())["models"]["toy"]["results"]["bf16"]
    assert measured["losses"][-1] < measured["losses"][0]
    assert measured["tokens_per_second"] > 0
    assert "tokens/s  TFLOP/s  MFU" in result.stdout

    imported = set((tmp_path / "imports").read_text().split())
    local = {"geojax", *(path.stem for path in SCRIPT.parent.glob("*.py"))}
    assert "jax" in imported, "the recorder has seen geojax"
    assert imported - PERMITTED - local - sys.stdlib_module_names == set()


def test_a_side_that_is_not_there_is_named(tmp_path):
    result = subprocess.run(
        [sys.executable, SCRIPT, "--toy", "--only", "fp32"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 1
    assert "no side is called 'fp32'; there are: bf16, fp16" in result.stderr


def test_two_sites_on_one_device_exchange_buckets_while_they_compute(tmp_path):
    output, trace = tmp_path / "out.json", tmp_path / "trace.json"
    line = [sys.executable, SCRIPT.with_name("islands.py"), "--toy", "--steps", "3"]
    result = subprocess.run(
        [*line, "--microbatches", "2", "--output", output, "--trace", trace],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads(output.read_text())
    for made in record["sites"].values():
        assert len(made["losses"]) == 3
        assert made["sent_bytes"] > 4 * record["work"]["parameters"]
    assert 0 < record["share_under_compute"] <= 1
    events = json.loads(trace.read_text())["traceEvents"]
    tracks = {each["args"]["name"]: each["tid"] for each in events if each["ph"] == "M"}
    assert set(tracks) == {"site east", "site west", "east to west", "west to east"}
    moving = [each for each in events if each["tid"] == tracks["east to west"] and "ts" in each]
    # Three buckets, and the scalars.
    assert sorted(each["name"] for each in moving) == ["0", "1", "2", "scalars"]
