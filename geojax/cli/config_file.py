"""The config file of a run as an argument of subcommands."""

from pathlib import Path
from typing import Annotated, TypeAlias

import tyro

ConfigFile: TypeAlias = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")]
