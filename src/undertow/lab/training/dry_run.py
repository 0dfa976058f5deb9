"""What a recipe would cost before anything is trained: its model on the meta device, a look at the
data, estimates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from undertow.depth.handle import depth_handle
from undertow.errors import ConfigError, DataError
from undertow.host.attachment import find_pathway, recurs_in_time
from undertow.host.support import find_stack
from undertow.lab.runs.loading import context_of, load_tokenizer
from undertow.lab.runs.recipe import Recipe
from undertow.lab.tables import table
from undertow.lab.training.build import count_parameters, outline, tokenizer_for
from undertow.lab.training.data import most_tokens
from undertow.lab.training.fit import check_data, check_model

# Sustained rates in TFLOP/s, by training.precision, within reach for models of 100 million
# parameters and more: three or four tenths of the peak, six of plain fp32's. None where a device
# lacks the arithmetic, or is many times slower in it.
DEVICES: dict[str, dict[str, float]] = {
    "2 CPU cores": {"fp32": 0.1},
    "A100": {"fp32": 12.0, "tf32": 60.0, "bf16": 120.0},
    "H100": {"fp32": 40.0, "tf32": 150.0, "bf16": 300.0},
}
EXAMPLES = 32  # that the mean length is taken of


@dataclass(frozen=True)
class Estimate:
    """What a run would take.

    Attributes:
        parameters, trained: of the model, and those that training changes.
        tokens: of a training example, padding not counted, and its pauses counted.
        total_tokens: of the whole training.
        forward, training: floating-point operations a token, of one plain forward and of a training
            step.
        weights: bytes of weights, gradients and AdamW's two moments.
        activations: rough bytes of what the backward pass of one batch needs.
        size: how many training examples there are; None if that is not known before all is read, or
            there is no end.
        left_out: the share of the examples looked at that have more than max_tokens tokens.
    """

    parameters: int
    trained: int
    tokens: float
    total_tokens: float
    forward: float
    training: float
    weights: int
    activations: float
    size: int | None
    left_out: float


def dry_run(recipe: Recipe, devices: int = 1) -> str:
    """Build the model on the meta device, read some training and held-out examples, and tell what
    training on a number of `devices`, one a process, would cost.

    Nothing is written. Memory is a device's own. Memory and time are rough: rates are those that
    `DEVICES` assumes, and what devices tell each other takes no time.

    Raises:
        UndertowError: the recipe asks for what cannot be done, or its data cannot be read.
    """
    section = recipe.training
    if devices < 1 or section.batch % devices:
        raise ConfigError(
            f"devices is {devices}, of which each takes an equal part of training.batch, "
            f"{section.batch}; use a number that divides it, or change training.batch"
        )
    parts = devices if section.sharding == "full" else 1  # of the weights and what goes with them
    check_data(recipe)
    tokenizer = (
        tokenizer_for(recipe) if recipe.model.path is None else load_tokenizer(recipe.model.path)
    )
    model = outline(recipe)
    check_model(recipe, model, tokenizer)
    found = estimate(recipe, model, tokenizer)
    known = "without end" if recipe.task.endless else "not counted yet"
    precision = recipe.training.precision
    solver = f", found by {recipe.solver}" if recurs_in_time(model) else ""
    lines = [
        f"{recipe.name}: {type(model).__name__}{solver}",
        "",
        table(
            ["what", "how much"],
            [
                ["parameters", f"{found.parameters:,}"],
                ["trained", f"{found.trained:,}"],
                ["training examples", known if found.size is None else f"{found.size:,}"],
                ["too long, of those looked at", f"{100 * found.left_out:.0f} %"],
                ["tokens an example", f"{found.tokens:.0f}"],
                ["tokens in all", f"{found.total_tokens:.3g}"],
                ["forward, FLOPs a token", f"{found.forward:.3g}"],
                ["training, FLOPs a token", f"{found.training:.3g}"],
                ["devices", f"{devices}"],
                ["weights, gradients, AdamW", f"{found.weights / parts / 2**30:.2f} GiB"],
                ["activations of a batch", f"about {found.activations / devices / 2**30:.2f} GiB"],
            ],
        ),
        "",
        table(
            ["device", f"TFLOP/s assumed, {precision}", "rough time a seed"],
            [
                [
                    device,
                    rates[precision],
                    duration(
                        found.training * found.total_tokens / (1e12 * rates[precision] * devices)
                    ),
                ]
                for device, rates in DEVICES.items()
                if precision in rates
            ],
        ),
    ]
    if recurs_in_time(model) and recipe.solver.passes() == (1, 1):
        lines += [
            "",
            "An exact rollout runs the block token after token, and Auto may: the times above "
            "count operations alone, and it takes longer than that; `undertow bench` measures how "
            "much.",
        ]
    return "\n".join(lines)


def estimate(recipe: Recipe, model: Any, tokenizer: PreTrainedTokenizerBase) -> Estimate:
    """What training the recipe takes, from its model's shape and its first examples."""
    section = recipe.training
    context = context_of(model)
    limit = most_tokens(section, context)
    items, size = recipe.task.first("train", tokenizer, EXAMPLES)
    lengths = [len(item["input_ids"]) for item in items]
    kept = [
        length for length in lengths if section.max_tokens is None or length <= section.max_tokens
    ]
    if not kept:
        raise DataError(
            f"the first {len(lengths)} training examples all have more than {section.max_tokens} "
            "tokens; raise training.max_tokens"
        )
    if limit is not None and max(kept) > limit:
        raise DataError(
            f"a training example has {max(kept)} tokens, but the model reads {context} at most; "
            "raise model.positions, shorten the examples, or leave such ones out by "
            "training.max_tokens"
        )
    recipe.task.first("valid", tokenizer, 1)
    each = 1 + recipe.model.pauses
    tokens = each * sum(kept) / len(kept)
    batch = section.batch * section.accumulate
    steps = section.steps
    if section.epochs is not None:
        known = section.examples or size
        if known is None:
            raise ConfigError(
                "how long training.epochs take is not known before all is read; set "
                "training.examples or steps"
            )
        steps = math.ceil(section.epochs * known * len(kept) / len(lengths) / batch)

    counts = count_parameters(model)
    parameters, trained = counts["parameters"], counts["trainable"]
    whole, block = layer_costs(recipe, model, tokens)
    forward_passes, backward_passes = recipe.solver.passes() if recurs_in_time(model) else (1, 1)
    forward = whole + block * (forward_passes - 1)
    backward = 2 * (whole + block * (backward_passes - 1))
    config = model.config.get_text_config()
    per_layer = 10 * config.hidden_size + 3 * (
        getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    )
    if section.activation_checkpointing:
        per_layer = config.hidden_size
    stored = 2 if section.precision == "bf16" else 4
    depth = config.num_hidden_layers * (1 + (backward_passes - 1) * (block / whole))
    if recipe.depth is not None:
        graded = min(recipe.depth.mean, recipe.depth.schedule.backward)
        depth += (graded - 1) * len(depth_handle(model).settings.core)
    return Estimate(
        parameters=parameters,
        trained=trained,
        tokens=tokens,
        total_tokens=float(steps) * batch * tokens,
        forward=whole,
        training=forward + backward,
        size=size,
        left_out=1 - len(kept) / len(lengths),
        weights=4 * parameters + 12 * trained,
        activations=section.batch
        * tokens
        * (stored * depth * per_layer + 8 * config.vocab_size / each),  # logits in fp32
    )


def layer_costs(recipe: Recipe, model: Any, tokens: float) -> tuple[float, float]:
    """Operations a token of one plain forward, at its mean depth, and those of them that lie in the
    recurrent block.

    Two for each weight of a matrix, and four for each channel of a head and each token it looks
    back at, half the sequence on average.
    """
    each = 1 + recipe.model.pauses
    head = model.get_output_embeddings()
    kinds = torch.nn.Linear | Conv1D | torch.nn.LSTM
    # PEFT keeps the recurrence that it copied, which does nothing.
    matrices = {
        n: m
        for n, m in model.named_modules()
        if isinstance(m, kinds) and ".original_module." not in n
    }
    costs = {
        name: 2.0 * sum(p.numel() for p in module.parameters()) for name, module in matrices.items()
    }
    # Of a token and its pauses only the last is predicted from.
    whole = sum(cost / (each if matrices[name] is head else 1) for name, cost in costs.items())
    config = model.config.get_text_config()
    if any(isinstance(module, torch.nn.LSTM) for module in matrices.values()):
        return whole, 0.0
    settings = getattr(getattr(model, "base", None), "config", config)
    heads = getattr(settings, "num_attention_heads", 0)
    width = getattr(settings, "head_dim", None) or config.hidden_size // max(heads, 1)
    attention = 4.0 * heads * width * tokens / 2
    whole += attention * config.num_hidden_layers
    if recipe.depth is not None:
        whole += (recipe.depth.mean - 1) * core_cost(model, costs, attention)
    if not recurs_in_time(model):
        return whole, 0.0
    stack, pathway = find_stack(model), find_pathway(model)
    block = attention * len(pathway.block)
    block += sum(
        cost
        for name, cost in costs.items()
        if "recurrence." in name or layer_of(name, stack) in pathway.block
    )
    return whole, block


def core_cost(model: Any, costs: Mapping[str, float], attention: float) -> float:
    """Operations a token of one iteration of what a model with recurrence in depth loops."""
    handle = depth_handle(model)
    looped = {each for part in handle.looped for each in part.modules()}
    inside = sum(cost for name, cost in costs.items() if model.get_submodule(name) in looped)
    return inside + attention * len(handle.settings.core)


def layer_of(name: str, stack: str) -> int | None:
    """The number of the layer in the list `stack` that a module belongs to."""
    return (
        int(name.removeprefix(f"{stack}.").partition(".")[0])
        if name.startswith(f"{stack}.")
        else None
    )


def duration(seconds: float) -> str:
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.0f} {unit}"
    return f"{seconds:.0f} seconds"
