"""Every test sees eight simulated CPU devices, on any machine, and compiles fast."""

import gc
import os

from support.xla_flags import COMPILE_FAST

from geojax.runtime import simulate_devices

simulate_devices(8)
# For this process, and for those that it starts.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {COMPILE_FAST}"

# What JAX keeps grows into millions of objects, and looking for garbage among them as often as
# Python does by default takes a tenth of the time.
gc.set_threshold(100_000, 50, 50)


def pytest_addoption(parser):
    parser.addoption("--draws", type=int, default=16, help="layouts drawn by the property test")
    parser.addoption("--draws-seed", type=int, default=0, help="what they are drawn from")
    parser.addoption("--fuzz-cases", type=int, default=300, help="cases of bad input that are run")
    parser.addoption(
        "--pipelines",
        choices=["covering", "full"],
        default="covering",
        help="pipelines compared with one device: a few that cover all pairs, or the whole grid",
    )
