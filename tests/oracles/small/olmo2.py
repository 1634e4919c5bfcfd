"""A small OLMo 2."""

from small_families import SIZES, USUAL
from transformers import Olmo2Config

FAMILIES = {"olmo2": (Olmo2Config(**SIZES), USUAL)}
