"""The `geojax` command: a module for each subcommand, which parses, calls and prints."""

import importlib
import sys

from geojax.exit_codes import USAGE

# JAX reads its variables when it is imported, which the modules beside this one do.
try:
    importlib.import_module("jax")
except ValueError as error:
    print(f"error: JAX's variables: {error}; correct it, or unset the variable", file=sys.stderr)
    sys.exit(USAGE)
