"""PyTorch's side: a plain Llama, compiled, with flash attention, in bf16 over float32 weights."""

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from work import OPTIMIZER, answer, peak_resident_bytes, text, time_blocks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INITIAL_DEVIATION = 0.02


class Layer(nn.Module):
    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        hidden, wide, self.heads = (
            model["hidden_size"],
            model["intermediate_size"],
            model["num_attention_heads"],
        )
        self.groups, self.width = (
            model["num_key_value_heads"],
            hidden // model["num_attention_heads"],
        )
        self.attention_norm = nn.RMSNorm(hidden, eps=model["rms_norm_eps"])
        # One product for the three of the attention block, and one for the two of SwiGLU.
        rows = (self.heads + 2 * self.groups) * self.width
        self.query_key_value = nn.Linear(hidden, rows, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)
        self.feed_forward_norm = nn.RMSNorm(hidden, eps=model["rms_norm_eps"])
        self.gate_up = nn.Linear(hidden, 2 * wide, bias=False)
        self.down = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        heads = self.query_key_value(self.attention_norm(x))
        heads = heads.view(*x.shape[:2], -1, self.width).transpose(1, 2)
        sizes = (self.heads, self.groups, self.groups)
        query, key, value = heads.split(sizes, dim=1)  # [rows, heads, sequence, width] each
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(x.shape))
        gate, up = self.gate_up(self.feed_forward_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, model: dict[str, Any], sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model["vocab_size"], model["hidden_size"])
        self.layers = nn.ModuleList(Layer(model) for _ in range(model["num_hidden_layers"]))
        self.final_norm = nn.RMSNorm(model["hidden_size"], eps=model["rms_norm_eps"])
        self.head = nn.Linear(model["hidden_size"], model["vocab_size"], bias=False)
        width = model["hidden_size"] // model["num_attention_heads"]
        exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
        angles = torch.outer(
            torch.arange(sequence, dtype=torch.float64),
            model["rope_parameters"]["rope_theta"] ** -exponents,
        )
        self.register_buffer("cosine", angles.cos().float(), persistent=False)
        self.register_buffer("sine", angles.sin().float(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                is_output = name.endswith(("output.weight", "down.weight"))
                scale = 1 / math.sqrt(2 * model["num_hidden_layers"]) if is_output else 1.0
                nn.init.normal_(parameter, std=INITIAL_DEVIATION * scale)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # Automatic casts leave a look-up in float32, and with it everything that it is added to.
        x = self.embedding(tokens).bfloat16()
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        logits = self.head(self.final_norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat(turned, dim=-1).to(x.dtype)


def flash_attention() -> contextlib.AbstractContextManager[Any]:
    """Flash attention and nothing else, where there is a GPU."""
    if DEVICE.type == "cpu":
        return contextlib.nullcontext()
    return nn.attention.sdpa_kernel(nn.attention.SDPBackend.FLASH_ATTENTION)


def measure(work: dict[str, Any]) -> dict[str, Any]:
    """Train, and say how long steps took and what they held."""
    torch.manual_seed(0)
    with DEVICE:
        model = Llama(work["model"], work["sequence"])
    compiled = torch.compile(model)
    parameters = list(model.parameters())
    groups = [
        {
            "params": [p for p in parameters if p.ndim > 1],
            "weight_decay": OPTIMIZER["weight_decay"],
        },
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=OPTIMIZER["peak_learning_rate"],
        betas=(OPTIMIZER["beta1"], OPTIMIZER["beta2"]),
        eps=OPTIMIZER["epsilon"],
        fused=True,
    )
    batches = torch.from_numpy(text(work)).long().to(DEVICE)

    def step(number: int) -> torch.Tensor:
        rate = OPTIMIZER["peak_learning_rate"] * min(1, (number + 1) / OPTIMIZER["warmup_steps"])
        for group in optimizer.param_groups:
            group["lr"] = rate
        tokens = batches[number]
        optimizer.zero_grad(set_to_none=True)
        with flash_attention(), torch.autocast(DEVICE.type, torch.bfloat16):
            loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, OPTIMIZER["clip_norm"], foreach=True)
        optimizer.step()
        return loss.detach()

    measured = time_blocks(work, step, lambda losses: torch.stack(losses).tolist())
    on_gpu = DEVICE.type == "cuda"
    return measured | {
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else peak_resident_bytes(),
        "parameters": sum(p.numel() for p in parameters),
        "versions": {"torch": torch.__version__},
    }


if __name__ == "__main__":
    answer({"measure": measure})
