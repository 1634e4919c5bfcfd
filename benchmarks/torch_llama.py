"""The Llama of `geojax.models` in PyTorch, as one would write it for speed on a CPU.

From geojax's weights it gives geojax's losses. It may be a part of the model alone: consecutive
layers, with the embedding before the first and the head behind the last, for a pipeline's stages.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        hidden, wide, self.heads = (
            model["hidden_size"],
            model["intermediate_size"],
            model["num_attention_heads"],
        )
        self.attention_norm = nn.RMSNorm(hidden, eps=model["rms_norm_eps"])
        # One product for the three of the attention block, and one for the two of SwiGLU.
        self.query_key_value = nn.Linear(hidden, 3 * hidden, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)
        self.feed_forward_norm = nn.RMSNorm(hidden, eps=model["rms_norm_eps"])
        self.gate_up = nn.Linear(hidden, 2 * wide, bias=False)
        self.down = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        heads = self.query_key_value(self.attention_norm(x))
        heads = heads.view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)  # [rows, heads, sequence, head size] each
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(x.shape))
        gate, up = self.gate_up(self.feed_forward_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """The whole model, or the layers of `own`."""

    def __init__(self, model: dict[str, Any], sequence: int, own: Sequence[int] | None = None):
        super().__init__()
        own = range(model["num_hidden_layers"]) if own is None else own
        hidden, head_size = (
            model["hidden_size"],
            model["hidden_size"] // model["num_attention_heads"],
        )
        if 0 in own:
            self.embedding = nn.Embedding(model["vocab_size"], hidden)
        self.layers = nn.ModuleDict({str(index): Layer(model) for index in own})
        if model["num_hidden_layers"] - 1 in own:
            self.final_norm = nn.RMSNorm(hidden, eps=model["rms_norm_eps"])
            self.head = nn.Linear(hidden, model["vocab_size"], bias=False)
        self.is_first, self.is_last = 0 in own, model["num_hidden_layers"] - 1 in own
        exponents = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
        positions = torch.arange(sequence, dtype=torch.float64)
        angles = torch.outer(positions, model["rope_parameters"]["rope_theta"] ** -exponents)
        self.register_buffer("cosine", angles.cos().float(), persistent=False)
        self.register_buffer("sine", angles.sin().float(), persistent=False)

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Tokens, or the stream from the layers before, to the stream after these layers, the
        logits after the last, or the mean loss where there are `targets`."""
        x = self.embedding(x) if self.is_first else x
        for layer in self.layers.values():
            x = layer(x, self.cosine, self.sine)
        if self.is_last:
            x = self.head(self.final_norm(x))
        return x if targets is None else mean_loss(x, targets)


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of all tokens."""
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def load_weights(part: Llama, weights: dict[str, np.ndarray]) -> None:
    """Copy geojax's tree, named like `layers/attention/query/kernel` and stacked over layers.

    Kernels are [inputs, outputs] there, [outputs, inputs] here.
    """
    layers = {
        name.removeprefix("layers/"): value
        for name, value in weights.items()
        if name.startswith("layers/")
    }
    tensors: dict[str, np.ndarray] = {}
    if part.is_first:
        tensors["embedding.weight"] = weights["embedding/tokens/embedding"]
    if part.is_last:
        tensors["final_norm.weight"] = weights["final_norm/scale"]
        tensors["head.weight"] = weights["head/kernel"].T
    for index in part.layers:
        own = {name: value[int(index)] for name, value in layers.items()}

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
    part.load_state_dict(state)


def make_optimizer(
    parameters: Sequence[nn.Parameter], settings: dict[str, float]
) -> torch.optim.Optimizer:
    """AdamW as geojax's `OptimizerSettings` describe it, at its peak learning rate."""
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
