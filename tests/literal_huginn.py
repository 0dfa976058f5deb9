"""Huginn written out literally, token by token, from the paper's equations: slow, and checked
against the fast model."""

import math

import torch

from undertow.models import HuginnForCausalLM


def literal_logits(
    model: HuginnForCausalLM, ids: torch.Tensor, initial: torch.Tensor, depth: int
) -> torch.Tensor:
    """Logits ``[T, V]`` of one row of ids ``[T]`` from given initial states ``[T, D]``, in
    float64."""
    config = model.config
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        scale = (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + config.norm_eps).sqrt()
        return x / scale * weights[f"transformer.{name}.weight"]

    def turn(head: torch.Tensor, position: int) -> torch.Tensor:
        pairs = torch.complex(head[0::2], head[1::2])
        angles = torch.tensor(
            [position * config.rope_base ** (-2 * i / config.head_dim) for i in range(len(pairs))]
        )
        return (
            torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles))
            .flatten()
            .double()
        )

    def attention(name: str, x: torch.Tensor) -> torch.Tensor:
        width, heads, size = config.n_embd, config.n_heads, config.head_dim
        matrix = weights[f"transformer.{name}.Wqkv.weight"]
        bias = weights[f"transformer.{name}.qk_bias"][:, 0]
        rows = []
        for query_at in range(len(x)):
            mixed = []
            for head in range(heads):
                part = slice(head * size, (head + 1) * size)
                query = turn(matrix[:width][part] @ x[query_at] + bias[0, head], query_at)
                scores, values = [], []
                for key_at in range(query_at + 1):
                    key = turn(matrix[width : 2 * width][part] @ x[key_at] + bias[1, head], key_at)
                    scores.append(query @ key / math.sqrt(size))
                    values.append(matrix[2 * width :][part] @ x[key_at])
                mixed.append(torch.stack(scores).softmax(0) @ torch.stack(values))
            rows.append(weights[f"transformer.{name}.proj.weight"] @ torch.cat(mixed))
        return torch.stack(rows)

    def block(name: str, x: torch.Tensor) -> torch.Tensor:
        x = norm(f"{name}.norm_2", attention(f"{name}.attn", norm(f"{name}.norm_1", x)) + x)
        inner = norm(f"{name}.norm_3", x) @ weights[f"transformer.{name}.mlp.fc.weight"].T
        gate, up = inner[:, : config.intermediate_size], inner[:, config.intermediate_size :]
        branch = gate * torch.sigmoid(gate) * up @ weights[f"transformer.{name}.mlp.proj.weight"].T
        return norm(f"{name}.norm_4", branch + x)

    e = math.sqrt(config.n_embd) * weights["transformer.wte.weight"][ids]
    for i in range(config.n_layers_in_prelude):
        e = block(f"prelude.{i}", e)
    s = initial.double()
    for _ in range(depth):
        s = torch.cat([s, e], dim=-1) @ weights["transformer.adapter.weight"].T
        for i in range(config.n_layers_in_recurrent_block):
            s = block(f"core_block.{i}", s)
    x = norm("ln_f", s)
    for i in range(config.n_layers_in_coda):
        x = block(f"coda.{i}", x)
    return norm("ln_f", x) @ weights["lm_head.weight"].T
