"""Experts' matrices in MXFP4, as transformers converts them."""

import numpy as np
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from geojax.models.huggingface.mxfp4 import decode


def test_blocks_are_decoded_as_transformers_does():
    random = np.random.default_rng(0)
    pairs = random.integers(0, 256, (3, 10, 4, 16), np.uint8)
    scales = random.integers(2, 250, (3, 10, 4), np.uint8)
    theirs = convert_moe_packed_tensors(torch.from_numpy(pairs), torch.from_numpy(scales))
    np.testing.assert_array_equal(decode(pairs, scales).swapaxes(1, 2), theirs.float().numpy())
