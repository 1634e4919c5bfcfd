"""A process of PyTorch where the sites are stages of a pipeline (torch.distributed.pipelining)."""

import itertools
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch_llama import Llama, load_weights, make_optimizer, mean_loss

from wan_sides.serving import own_work, serve, take_steps
from wan_sides.torch_process import clip_by_norm, join, read_weights, tokens_and_targets
from wan_sides.work import (
    MICROBATCHES,
    MODEL,
    OPTIMIZER,
    ROWS,
    SEQUENCE,
    layers_of_chunks,
)

SINGLE = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


def own_parts(weights: dict[str, np.ndarray], chunks_of_stage: int) -> dict[int, Llama]:
    """The chunks of this process, by their numbers in the model's order."""
    ranks = dist.get_world_size()
    ends = list(itertools.accumulate(layers_of_chunks(ranks * chunks_of_stage)))
    parts = {}
    for chunk in range(dist.get_rank(), len(ends), ranks):
        first = ends[chunk - 1] if chunk else 0
        parts[chunk] = Llama(MODEL, SEQUENCE, range(first, ends[chunk]))
        load_weights(parts[chunk], weights)
    return parts


def make_stage(part: Llama, chunk: int, chunks: int) -> PipelineStage:
    rows, hidden = ROWS // MICROBATCHES, MODEL["hidden_size"]
    tokens = torch.zeros((rows, SEQUENCE), dtype=torch.long)
    stream = torch.zeros((rows, SEQUENCE, hidden), requires_grad=True)
    logits = torch.zeros((rows, SEQUENCE, MODEL["vocab_size"]), requires_grad=True)
    return PipelineStage(
        part,
        chunk,
        chunks,
        torch.device("cpu"),
        input_args=(tokens if part.is_first else stream,),
        output_args=(logits if part.is_last else stream,),
    )


class Worker:
    def start(self) -> dict[str, Any]:
        work = own_work()
        join(work)
        settings, microbatches = work["settings"], work["repeats"] * MICROBATCHES
        chunks = dist.get_world_size() * settings["chunks"]
        parts = own_parts(read_weights(work), settings["chunks"])
        stages = [make_stage(part, chunk, chunks) for chunk, part in parts.items()]
        if settings["schedule"] in SINGLE:
            make = SINGLE[settings["schedule"]]
            self.schedule = make(stages[0], microbatches, loss_fn=mean_loss)
        else:
            self.schedule = ScheduleInterleaved1F1B(stages, microbatches, loss_fn=mean_loss)
        self.is_first, self.is_last = (
            any(getattr(part, end) for part in parts.values()) for end in ("is_first", "is_last")
        )
        self.parameters = [p for part in parts.values() for p in part.parameters()]
        self.optimizer = make_optimizer(self.parameters, OPTIMIZER)
        self.tokens, self.targets = tokens_and_targets(work["repeats"])
        dist.barrier()
        return {"formula_bytes": None, "versions": {"torch": torch.__version__}}

    def one_step(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        inputs = (self.tokens,) if self.is_first else ()
        expected = {"target": self.targets, "losses": losses} if self.is_last else {}
        self.schedule.step(*inputs, **expected, return_outputs=False)
        own = nn.utils.get_total_norm([p.grad for p in self.parameters], foreach=True)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        both = torch.stack([own.square(), loss])
        dist.all_reduce(both)
        clip_by_norm(self.parameters, both[0].sqrt())
        self.optimizer.step()
        return float(both[1])

    def steps(self, count: int) -> dict[str, Any]:
        return take_steps(self.one_step, count)


if __name__ == "__main__":
    worker = Worker()
    serve({"start": worker.start, "steps": worker.steps})
