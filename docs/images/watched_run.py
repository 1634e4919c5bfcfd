"""Train the run of watch.png and report.png: two sites, two kills, a link that is slow for a while.

    PYTHONPATH=. python docs/images/watched_run.py runs/two-sites     # ten minutes; needs root

The sites are islands on this machine, joined by an emulated link of 21 ms and 1 Gbit/s. After step
150 the process of site west gets SIGKILL, after step 420 that of site east. From step 240 to 300
the link has 84 ms and 100 Mbit/s. The launcher begins anew after each kill.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

from geojax.wan import WanSettings, bring_up, reshape, take_down

ROOT = Path(__file__).resolve().parents[2]
NAME = "watched"
LINK = WanSettings(round_trip_seconds=0.021, bytes_per_second=125e6)
SLOW = WanSettings(round_trip_seconds=0.084, bytes_per_second=12.5e6)
KILLS = {150: "west", 420: "east"}
SLOW_FROM, SLOW_TO, STEPS = 240, 300, 600
LAUNCH = ["launch", "--wan", "--wan-name", NAME, "--islands", "--restarts", "3", "--", "train"]


def write_config(run: Path) -> Path:
    """Write the config and the topology beside the run directory; return the config's path."""
    config = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    site = {
        "hosts": 1,
        "accelerators_per_host": 1,
        "accelerator": {"name": "core", "peak_flops_per_second": {"float32": 100e9}},
    }
    link = {
        "sites": ["east", "west"],
        "round_trip_seconds": LINK.round_trip_seconds,
        "bytes_per_second": LINK.bytes_per_second,
    }
    topology = run.with_name("topology.yaml")
    sites = [{"name": name, **site} for name in link["sites"]]
    topology.write_text(yaml.safe_dump({"sites": sites, "links": [link]}))
    config |= {
        "run_directory": str(run),
        "steps": STEPS,
        "topology": str(topology),
        "simulate_devices": 1,
        "mesh": {"dc": 2},
        "dc": {"join": "islands"},
        "adapt": {"interval": 20},
        "checkpoint": {"interval": 50},
        "sample": {},
    }
    file = run.with_name("run.yaml")
    file.write_text(yaml.safe_dump(config))
    return file


def last_step(run: Path) -> int:
    """Return the last step in the metrics of the first site; 0: there is none."""
    metrics = run / "east" / "metrics.jsonl"
    if not metrics.exists():
        return 0
    whole = metrics.read_bytes().rpartition(b"\n")[0].splitlines()
    return max((json.loads(line)["step"] for line in whole), default=0)


def process_of(site: str, config: Path) -> int:
    """Return the process that trains a config in a site."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            variables = (folder / "environ").read_bytes().split(b"\0")
            is_site = f"GEOJAX_SITE={site}".encode() in variables
            if is_site and str(config).encode() in words and b"train" in words:
                return int(folder.name)
    raise SystemExit(f"no process trains in {site}")


def main() -> None:
    """Train with the faults."""
    run = Path(sys.argv[1]).resolve()
    run.parent.mkdir(parents=True, exist_ok=True)
    config = write_config(run)
    wan = bring_up(LINK, NAME)
    variables = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "geojax", *LAUNCH, str(config)]
    faults = {step: ("kill", site) for step, site in KILLS.items()}
    faults |= {SLOW_FROM: ("link", SLOW), SLOW_TO: ("link", LINK)}
    try:
        job = subprocess.Popen(command, env=variables)
        while job.poll() is None:
            time.sleep(0.2)
            due = [step for step in faults if step <= last_step(run)]
            for step in due:
                kind, what = faults.pop(step)
                if kind == "kill":
                    os.kill(process_of(str(what), config), signal.SIGKILL)
                else:
                    wan = reshape(wan, what)
        raise SystemExit(job.returncode)
    finally:
        take_down(NAME)


if __name__ == "__main__":
    main()
