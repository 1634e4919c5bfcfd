"""Whether this machine can emulate links: asked before a test brings one up."""

import os
import shutil

import pytest

from geojax.errors import RunError, UserError
from geojax.wan import namespaces, relay
from geojax.wan.namespaces import require_namespaces


def skip_without_compiler() -> None:
    """Skip the test where nothing can compile the relay; that it does not compile is a failure."""
    if not os.environ.get("CC") and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("needs a C compiler")


def skip_unless_possible(name: str) -> None:
    """Skip the test, with the reason, without root, namespaces, TUN devices or a C compiler.

    What fails after this is a failure of the test.
    """
    skip_without_compiler()
    relay.compiled()
    try:
        require_namespaces()
        trial = f"geojax.{name}.trial"
        namespaces.call("ip", "netns", "add", trial)
        os.close(relay.open_device(trial, "trial", whole_segments=True))
        namespaces.remove(trial)
    except (UserError, RunError) as reason:
        pytest.skip(str(reason))
