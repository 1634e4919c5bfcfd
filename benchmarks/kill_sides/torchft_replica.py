"""A replica of torchft that trains on one site's rows of each batch, and writes down its steps.

    python -m kill_sides.torchft_replica SITE ADDRESS LIGHTHOUSE BATCHES STEPS

It is torchft as its README has it: the manager's quorum beside the forward pass, gradients summed
over Gloo, a returned replica healed from another one by HTTP.
"""

import datetime
import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch_llama import Llama, make_optimizer
from torchft import Manager, Optimizer, ProcessGroupGloo

from kill_sides.work import (
    MICROBATCHES,
    MODEL,
    OPTIMIZER,
    SEQUENCE,
    SITE_ROWS,
    TOKENS_PER_SITE,
)

_STORE_PORT = 29_600
_TIMEOUT = datetime.timedelta(seconds=30)
_SEED = 0


def main(site: int, address: str, lighthouse: str, batches: Path, steps: Path) -> None:
    """Train until it is killed."""
    torch.set_num_threads(1)
    # States are served under the host's name, which all namespaces share.
    socket.gethostname = lambda: address
    torch.manual_seed(_SEED)
    model = Llama(MODEL, SEQUENCE)
    inner = make_optimizer(list(model.parameters()), OPTIMIZER)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = dist.TCPStore(address, _STORE_PORT, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=_TIMEOUT,
        quorum_timeout=2 * _TIMEOUT,
        connect_timeout=_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"site{site}",
        hostname=address,
    )
    optimizer = Optimizer(manager, inner)
    whole = np.load(batches, mmap_mode="r")  # [batches, rows, sequence + 1]
    own = slice(site * SITE_ROWS, (site + 1) * SITE_ROWS)
    with steps.open("a") as lines:
        while True:
            rows = torch.from_numpy(
                np.array(whole[manager.current_step() % len(whole), own], np.int64)
            )
            optimizer.zero_grad()
            loss = passes(manager, model, rows)
            nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip_norm"])
            before = manager.current_step()
            optimizer.step()
            if manager.current_step() > before:
                line = {
                    "time": time.time(),
                    "step": manager.current_step(),
                    "participants": manager.num_participants(),
                    "tokens": manager.num_participants() * TOKENS_PER_SITE,
                    "loss": loss,
                }
                lines.write(json.dumps(line) + "\n")
                lines.flush()


def passes(manager: Manager, model: Llama, rows: torch.Tensor) -> float:
    """Go forwards and backwards through all microbatches, and sum the gradients in one message.

    torchft's DistributedDataParallel ends the process at the first sum that fails (0.2.0).

    Returns:
        The mean loss of this site's rows.
    """
    pieces = rows.chunk(MICROBATCHES)
    total = 0.0
    for piece in pieces:
        loss = model(piece[:, :-1], piece[:, 1:].contiguous()) / len(pieces)
        loss.backward()
        total += float(loss.detach())
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    whole = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(whole).wait()
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, piece in zip(gradients, whole.split(sizes), strict=True):
        gradient.copy_(piece.view_as(gradient))
    return total


if __name__ == "__main__":
    number, host, quorum, data, written = sys.argv[1:]
    main(int(number), host, quorum, Path(data), Path(written))
