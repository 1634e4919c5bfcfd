"""A process of PyTorch where each site trains on its own rows.

`ddp` is DistributedDataParallel. `hierarchical` is written by hand: gradients in buckets, each
reduced as soon as it is full while the backward goes on. A whole hierarchy scatters a bucket inside
the site, sums shards over the sites and gathers them inside; a site of one process has its shard,
which is the bucket, and needs only the sum.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_llama import Llama, load_weights, make_optimizer

from wan_sides.serving import own_work, serve, take_steps
from wan_sides.torch_process import clip_by_norm, join, read_weights, tokens_and_targets
from wan_sides.work import MODEL, OPTIMIZER, ROWS, SEQUENCE


class Bucket:
    """Parameters whose gradients lie one behind the other and travel together."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.gradients = torch.zeros(sum(p.numel() for p in parameters))
        self.missing = len(parameters)
        self.sum: dist.Work | None = None
        pieces = self.gradients.split([p.numel() for p in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def _arrived(self, parameter: nn.Parameter) -> None:
        self.missing -= 1
        if self.missing == 0:
            self.sum = dist.all_reduce(self.gradients, async_op=True)

    def finish(self) -> None:
        """Wait for the sum, make it a mean."""
        assert self.sum is not None, "every parameter has a gradient"
        self.sum.wait()
        self.gradients /= dist.get_world_size()
        self.missing = len(self.parameters)


def make_buckets(model: nn.Module, largest_bytes: int) -> list[Bucket]:
    """In the order in which gradients come, last parameters first."""
    groups: list[list[nn.Parameter]] = [[]]
    held = 0
    for parameter in reversed(list(model.parameters())):
        size = 4 * parameter.numel()
        if groups[-1] and held + size > largest_bytes:
            groups.append([])
            held = 0
        groups[-1].append(parameter)
        held += size
    return [Bucket(group) for group in groups]


class Worker:
    def start(self) -> dict[str, Any]:
        work = own_work()
        join(work)
        settings = work["settings"]
        self.model = Llama(MODEL, SEQUENCE)
        load_weights(self.model, read_weights(work))
        self.parameters = list(self.model.parameters())
        self.optimizer = make_optimizer(self.parameters, OPTIMIZER)
        self.buckets: list[Bucket] = []
        self.forward: nn.Module = self.model
        if settings["method"] == "ddp":
            self.forward = DistributedDataParallel(
                self.model,
                bucket_cap_mb=settings["bucket_megabytes"],
                gradient_as_bucket_view=True,
            )
        else:
            self.buckets = make_buckets(self.model, settings["bucket_megabytes"] * 2**20)
        share = ROWS // dist.get_world_size()
        own = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
        self.tokens, self.targets = (whole[own] for whole in tokens_and_targets())
        dist.barrier()
        return {"formula_bytes": None, "versions": {"torch": torch.__version__}}

    def one_step(self) -> float:
        self._forget_gradients()
        loss = self.forward(self.tokens, self.targets)
        total = loss.detach().clone()
        total_sum = dist.all_reduce(total, async_op=True)
        loss.backward()
        for bucket in self.buckets:
            bucket.finish()
        gradients = [p.grad for p in self.parameters]
        clip_by_norm(self.parameters, nn.utils.get_total_norm(gradients, foreach=True))
        self.optimizer.step()
        assert total_sum is not None, "asynchronous"
        total_sum.wait()
        return float(total) / dist.get_world_size()

    def _forget_gradients(self) -> None:
        if not self.buckets:
            self.optimizer.zero_grad(set_to_none=True)
        for bucket in self.buckets:  # gradients stay views of them
            bucket.gradients.zero_()

    def steps(self, count: int) -> dict[str, Any]:
        return take_steps(self.one_step, count)


if __name__ == "__main__":
    worker = Worker()
    serve({"start": worker.start, "steps": worker.steps})
