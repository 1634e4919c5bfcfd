"""How PyTorch's contestants start their processes, and what ends each of their steps."""

import datetime
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from wan_sides.work import OPTIMIZER, batch

_PORT = 29_500
_PATIENCE = datetime.timedelta(minutes=5)


def join(work: dict[str, Any]) -> None:
    """Make this process one of the two of a Gloo group."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{work['coordinator']}:{_PORT}",
        rank=work["process"],
        world_size=2,
        timeout=_PATIENCE,
    )


def read_weights(work: dict[str, Any]) -> dict[str, np.ndarray]:
    """geojax's initial weights."""
    with np.load(work["weights"]) as weights:
        return dict(weights)


def tokens_and_targets(repeats: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, sequence] each, of the global batch."""
    whole = batch(repeats)
    return torch.from_numpy(whole["tokens"]).long(), torch.from_numpy(whole["targets"]).long()


def clip_by_norm(parameters: Iterable[nn.Parameter], norm: torch.Tensor) -> None:
    """Scale the gradients to the largest norm allowed, if `norm` is theirs."""
    nn.utils.clip_grads_with_norm_(parameters, OPTIMIZER["clip_norm"], norm, foreach=True)
