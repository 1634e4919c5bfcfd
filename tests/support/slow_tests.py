"""Choose the tests that continuous integration leaves to `./launch/test --all`.

    pytest -n 3 tests/unit --junitxml durations.xml
    python tests/support/slow_tests.py durations.xml      # writes tests/slow.txt

A test is slow if it takes more than `SECONDS`. Of a test with several parameters the fastest stays,
unless it takes more than `MOST_SECONDS`: what the test is for is then still looked at. Tests in
`KEPT` are never slow. A report of continuous integration's tests adds to the list.
"""

import argparse
import collections
import xml.etree.ElementTree
from pathlib import Path

SECONDS, MOST_SECONDS = 1.0, 2.0
KEPT = (
    "tests/equality/",
    "tests/unit/islands/test_islands_equal_one_device.py",
    "tests/unit/planner/test_step_traffic.py::test_collectives_of_each_layout",
    "tests/unit/test_core_files.py",
)
"""Layouts and islands against one device, the messages of each layout, and files of a batch."""
LIST = Path(__file__).resolve().parents[1] / "slow.txt"


def slow_tests(durations: dict[str, float]) -> list[str]:
    """Return the names of slow tests, of the seconds that each test took."""
    of_function: dict[str, list[str]] = collections.defaultdict(list)
    for name in durations:
        of_function[name.partition("[")[0]].append(name)
    fastest = {min(names, key=durations.__getitem__) for names in of_function.values()}
    return sorted(
        name
        for name, seconds in durations.items()
        if seconds > (MOST_SECONDS if name in fastest else SECONDS) and not name.startswith(KEPT)
    )


def read(report: Path) -> dict[str, float]:
    """Return the seconds of each test of a JUnit report, by its name as pytest prints it."""
    cases = xml.etree.ElementTree.parse(report).iter("testcase")
    return {
        f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}": float(
            case.attrib["time"]
        )
        for case in cases
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path)
    durations = read(parser.parse_args().report)
    unmeasured = set(LIST.read_text().splitlines()) - durations.keys()
    chosen = sorted(unmeasured.union(slow_tests(durations)))
    LIST.write_text("".join(f"{name}\n" for name in chosen))
    print(f"{len(chosen)} tests are slow: {LIST}")
