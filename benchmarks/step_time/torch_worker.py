"""The PyTorch side: the same Llama, as one would write it for speed on a CPU."""

import json
import sys

from protocol import memory_bytes, pin_to_cores, reset_peak_memory, serve, time_calls

WORK = json.loads(sys.argv[1])
pin_to_cores(WORK["threads"])

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch_llama import Llama, load_weights, make_optimizer

torch.set_num_threads(WORK["threads"])

ROWS, SEQUENCE = WORK["rows"], WORK["sequence"]
MODEL = WORK["model"]
HEADS = MODEL["num_attention_heads"]
HEAD_SIZE = MODEL["hidden_size"] // HEADS


class Worker:
    def __init__(self) -> None:
        self.model = Llama(MODEL, SEQUENCE)
        with np.load(WORK["weights"]) as weights:
            load_weights(self.model, dict(weights))
        with np.load(WORK["batch"]) as batch:
            self.tokens = torch.from_numpy(batch["tokens"]).long()
            self.targets = torch.from_numpy(batch["targets"]).long()
        self.loss = torch.compile(self.model) if WORK["compile"] else self.model
        self.optimizer = make_optimizer(list(self.model.parameters()), WORK["optimizer"])

    def one_step(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.tokens, self.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(
            self.model.parameters(), WORK["optimizer"]["clip_norm"], foreach=True
        )
        self.optimizer.step()
        return float(loss.detach())

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}

    def losses(self, count: int) -> list[float]:
        return [self.one_step() for _ in range(count)]

    def steps(self, count: int) -> list[float]:
        return time_calls(self.one_step, count)

    def memory(self, count: int) -> dict[str, int]:
        reset_peak_memory()
        time_calls(self.one_step, count)
        return memory_bytes()

    def parts(self, count: int) -> dict[str, float]:
        """Seconds of each part of a step by itself, forward and backward: the best of `count`."""
        programs = {
            "attention": (MODEL["num_hidden_layers"], self._attention()),
            "matrix products": (MODEL["num_hidden_layers"], self._products()),
            "loss": (1, self._loss()),
            "optimizer": (1, self._optimizer()),
        }
        seconds = {}
        for name, (repeat, call) in programs.items():
            time_calls(call, 2)
            seconds[name] = repeat * min(time_calls(call, count))
        return seconds

    def _attention(self):
        shape = (ROWS, SEQUENCE, HEADS, HEAD_SIZE)
        inputs = [x.transpose(1, 2) for x in _random(shape, shape, shape)]

        def attend(query, key, value):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        return _forward_and_backward(attend, inputs)

    def _products(self):
        tokens = ROWS * SEQUENCE
        layer = self.model.layers["0"]
        linears = (layer.query_key_value, layer.output, layer.gate_up, layer.down)
        weights = [_random(tuple(linear.weight.shape))[0] for linear in linears]
        states = _random(*((tokens, linear.in_features) for linear in linears))

        def products(*inputs):
            pairs = zip(inputs[: len(linears)], inputs[len(linears) :], strict=True)
            return [F.linear(x, weight) for x, weight in pairs]

        return _forward_and_backward(products, states + weights)

    def _loss(self):
        hidden, vocabulary = MODEL["hidden_size"], MODEL["vocab_size"]

        def loss(states, weight):
            return F.cross_entropy(F.linear(states, weight), self.targets.view(-1))

        loss = torch.compile(loss) if WORK["compile"] else loss
        return _forward_and_backward(loss, _random((ROWS * SEQUENCE, hidden), (vocabulary, hidden)))

    def _optimizer(self):
        parameters = [nn.Parameter(p.detach().clone()) for p in self.model.parameters()]
        optimizer = make_optimizer(parameters, WORK["optimizer"])
        gradients = [torch.ones_like(p) for p in parameters]

        def call() -> None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            nn.utils.clip_grad_norm_(parameters, WORK["optimizer"]["clip_norm"], foreach=True)
            optimizer.step()

        return call


def _random(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(0.1 * torch.randn(s, generator=generator)).requires_grad_() for s in shapes]


def _forward_and_backward(function, inputs):
    leaves = [x.detach().requires_grad_() for x in inputs]

    def call() -> None:
        output = function(*leaves)
        outputs = output if isinstance(output, list) else [output]
        torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])

    return call


if __name__ == "__main__":
    worker = Worker()
    serve({name: getattr(worker, name) for name in WORK["requests"]})
