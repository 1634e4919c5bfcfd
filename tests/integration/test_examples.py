"""The examples of the documentation run as they stand, in a process of their own."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_own_model_trains_across_two_sites():
    run = subprocess.run(
        [sys.executable, EXAMPLES / "own_model.py"], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", run.stdout)]
    assert len(losses) >= 2, run.stdout
    assert losses[-1] < 0.5 * losses[0], f"the loss did not fall: {losses}"
    crossing = [line.split() for line in run.stdout.splitlines() if line.startswith("dc ")]
    assert [words[1] for words in crossing] == ["all-reduce"], run.stdout
