"""Unit tests compile in a hurry."""

import os

from support.xla_flags import LESS

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {LESS}"
