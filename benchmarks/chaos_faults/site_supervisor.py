"""The supervisor of one site, with the function by which `geojax launch --supervise` runs it.

    python site_supervisor.py SITE COMMAND [ARGUMENT ...]

The environment is the site's.
"""

import sys

from geojax.launch import Output, Worker, supervise_sites
from geojax.launch import reaper as reaper_script

_GRACE_SECONDS = 10.0
_LIMIT = 10**6
"""A site fails more often than the default lets it."""


def main() -> int:
    """Run the site until its command ends for good; return the exit code."""
    site, *command = sys.argv[1:]
    split = command.index("--")
    prefix, command = command[:split], command[split + 1 :]
    reaped = [sys.executable, "-I", reaper_script.__file__, f"{_GRACE_SECONDS:g}", *command]
    worker = Worker(0, site, (*prefix, *reaped), {"PYTHONUNBUFFERED": "1"})
    output = Output([worker], sys.stdout, sys.stderr)
    outcomes = supervise_sites([[worker]], output, limit=_LIMIT, grace_seconds=_GRACE_SECONDS)
    codes = [outcome.exit_code for outcome in outcomes]
    output.log(f"site {site} ended for good, exit code {codes[0]}")
    return codes[0]


if __name__ == "__main__":
    raise SystemExit(main())
