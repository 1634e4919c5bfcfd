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

torch.set_num_threads(WORK["threads"])

ROWS, SEQUENCE = WORK["rows"], WORK["sequence"]
MODEL = WORK["model"]
HEADS = MODEL["heads"]
HEAD_SIZE = MODEL["hidden"] // HEADS


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden, wide = MODEL["hidden"], MODEL["feed_forward"]
        self.attention_norm = nn.RMSNorm(hidden, eps=MODEL["norm_epsilon"])
        # One product for the three of the attention block, and one for the two of SwiGLU.
        self.query_key_value = nn.Linear(hidden, 3 * hidden, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)
        self.feed_forward_norm = nn.RMSNorm(hidden, eps=MODEL["norm_epsilon"])
        self.gate_up = nn.Linear(hidden, 2 * wide, bias=False)
        self.down = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        heads = self.query_key_value(self.attention_norm(x))
        heads = heads.view(*x.shape[:2], 3, HEADS, HEAD_SIZE).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)  # [rows, heads, sequence, head size] each
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(x.shape))
        gate, up = self.gate_up(self.feed_forward_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(MODEL["vocabulary"], MODEL["hidden"])
        self.layers = nn.ModuleList(Layer() for _ in range(MODEL["layers"]))
        self.final_norm = nn.RMSNorm(MODEL["hidden"], eps=MODEL["norm_epsilon"])
        self.head = nn.Linear(MODEL["hidden"], MODEL["vocabulary"], bias=False)
        exponents = torch.arange(0, HEAD_SIZE, 2, dtype=torch.float64) / HEAD_SIZE
        angles = torch.outer(
            torch.arange(SEQUENCE, dtype=torch.float64), MODEL["rotary_base"] ** -exponents
        )
        self.register_buffer("cosine", angles.cos().float(), persistent=False)
        self.register_buffer("sine", angles.sin().float(), persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        logits = self.head(self.final_norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def load_weights(model: Llama, weights: dict[str, np.ndarray]) -> None:
    """Copy geojax's tree: kernels are [inputs, outputs] there, [outputs, inputs] here."""
    layers = {
        name.removeprefix("layers/"): value
        for name, value in weights.items()
        if name.startswith("layers/")
    }
    tensors = {
        "embedding.weight": weights["embedding/tokens/embedding"],
        "final_norm.weight": weights["final_norm/scale"],
        "head.weight": weights["head/kernel"].T,
    }
    for index in range(MODEL["layers"]):
        own = {name: value[index] for name, value in layers.items()}

        def joined(*names: str, own: dict[str, np.ndarray] = own) -> np.ndarray:
            return np.concatenate([own[f"{name}/kernel"] for name in names], axis=1).T

        query_key_value = ("attention/query", "attention/key", "attention/value")
        tensors |= {
            f"layers.{index}.{name}.weight": value
            for name, value in {
                "attention_norm": own["attention_norm/scale"],
                "query_key_value": joined(*query_key_value),
                "output": joined("attention/output"),
                "feed_forward_norm": own["feed_forward_norm/scale"],
                "gate_up": joined("feed_forward/gate", "feed_forward/up"),
                "down": joined("feed_forward/down"),
            }.items()
        }
    state = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in tensors.items()}
    model.load_state_dict(state)


class Worker:
    def __init__(self) -> None:
        self.model = Llama()
        with np.load(WORK["weights"]) as weights:
            load_weights(self.model, dict(weights))
        with np.load(WORK["batch"]) as batch:
            self.tokens = torch.from_numpy(batch["tokens"]).long()
            self.targets = torch.from_numpy(batch["targets"]).long()
        self.loss = torch.compile(self.model) if WORK["compile"] else self.model
        self.optimizer = make_optimizer(list(self.model.parameters()))

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
            "attention": (MODEL["layers"], self._attention()),
            "matrix products": (MODEL["layers"], self._products()),
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
        layer = self.model.layers[0]
        linears = (layer.query_key_value, layer.output, layer.gate_up, layer.down)
        weights = [_random(tuple(linear.weight.shape))[0] for linear in linears]
        states = _random(*((tokens, linear.in_features) for linear in linears))

        def products(*inputs):
            pairs = zip(inputs[: len(linears)], inputs[len(linears) :], strict=True)
            return [F.linear(x, weight) for x, weight in pairs]

        return _forward_and_backward(products, states + weights)

    def _loss(self):
        hidden, vocabulary = MODEL["hidden"], MODEL["vocabulary"]

        def loss(states, weight):
            return F.cross_entropy(F.linear(states, weight), self.targets.view(-1))

        loss = torch.compile(loss) if WORK["compile"] else loss
        return _forward_and_backward(loss, _random((ROWS * SEQUENCE, hidden), (vocabulary, hidden)))

    def _optimizer(self):
        parameters = [nn.Parameter(p.detach().clone()) for p in self.model.parameters()]
        optimizer = make_optimizer(parameters)
        gradients = [torch.ones_like(p) for p in parameters]

        def call() -> None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            nn.utils.clip_grad_norm_(parameters, WORK["optimizer"]["clip_norm"], foreach=True)
            optimizer.step()

        return call


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    settings = WORK["optimizer"]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings["weight_decay"]},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=settings["peak_learning_rate"],
        betas=(settings["beta1"], settings["beta2"]),
        eps=settings["epsilon"],
        fused=True,
    )


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
