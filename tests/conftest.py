"""Every test sees eight simulated CPU devices, on any machine."""

from geojax.runtime import simulate_devices

simulate_devices(8)


def pytest_addoption(parser):
    parser.addoption("--draws", type=int, default=16, help="layouts drawn by the property test")
    parser.addoption("--draws-seed", type=int, default=0, help="what they are drawn from")
    parser.addoption(
        "--pipelines",
        choices=["covering", "full"],
        default="covering",
        help="pipelines compared with one device: a few that cover all pairs, or the whole grid",
    )
