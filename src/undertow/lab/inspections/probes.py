"""Two-layer MLP probes that predict the next token from each layer's output (T²MLR, "Scale and
retrofitting").

The loss of token t + 1 reaches the computation of token t through the recurrent state, which should
make its layers anticipate what comes. How early they do is what such probes show, against those of
a model without recurrence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from undertow.errors import ConfigError
from undertow.host.support import find_stack
from undertow.lab.evaluation.accuracy import evaluating
from undertow.lab.evaluation.figures import lines_figure
from undertow.lab.inspections.compared import labels
from undertow.lab.inspections.inspection import BASELINE, examples, inspection
from undertow.lab.inspections.looking import batches_of
from undertow.lab.runs.run import Experiment
from undertow.lab.tables import table
from undertow.lab.tasks import model_inputs
from undertow.lab.tasks.encode import IGNORED

Batch = Mapping[str, torch.Tensor]


def probe_losses(
    model: Any,
    train: Sequence[Batch],
    valid: Sequence[Batch],
    hidden: int = 256,
    steps: int = 300,
    seed: int = 0,
) -> list[float]:
    """The held-out loss, in nats a token, of a probe on each layer's output, the first layer's
    first.

    A probe is `Linear, GELU, Linear` on normalised states, trained by AdamW for `steps` steps of
    256 tokens. The model is not trained, and its states are the exact rollout's.

    Args:
        train, valid: batches of input_ids, attention_mask and labels ``[B, T]``, as a collator
            gives them.
        hidden: width of the probes.

    Raises:
        ConfigError: the batches have no labelled token, or the layers cannot be probed (see
            `at_tokens`).
    """
    trained, held_out = layer_outputs(model, train), layer_outputs(model, valid)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    return [
        _probe(layer, trained[1], other, held_out[1], vocabulary, hidden, steps, seed)
        for layer, other in zip(trained[0], held_out[0], strict=True)
    ]


def layer_outputs(model: Any, batches: Sequence[Batch]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Every layer's output at the tokens that predict a labelled one: ``[N, D]`` for each layer,
    and the labels ``[N]``."""
    layers = model.get_submodule(find_stack(model))
    found: list[list[torch.Tensor]] = [[] for _ in layers._modules]
    labels = []
    with evaluating(model):
        for batch in batches:
            inputs = model_inputs(batch, model.device)
            with recording(list(layers._modules.values())) as pieces:
                model(**inputs, use_cache=False)
            following = batch["labels"][:, 1:].to(model.device)
            wanted = following != IGNORED
            labels.append(following[wanted])
            for kept, own in zip(found, pieces, strict=True):
                kept.append(at_tokens(own, batch["labels"].shape[1])[:, :-1][wanted].float())
    if not labels or not len(torch.cat(labels)):
        raise ConfigError("the batches have no labelled token to probe for; give more examples")
    return [torch.cat(kept).clone() for kept in found], torch.cat(labels).clone()


def at_tokens(calls: Sequence[torch.Tensor], tokens: int) -> torch.Tensor:
    """A layer's output ``[B, T, D]`` at each token, of the outputs of its calls in a forward.

    A loop calls it on all tokens again and again, of which the last counts; a rollout on a few
    tokens at a time; and with pauses each token takes several positions, of which the last
    predicts.

    Raises:
        ConfigError: its outputs are none of these, or the layer was not called.
    """
    pieces = calls[-1:] if calls and calls[-1].shape[1] % tokens == 0 else calls
    each, rest = divmod(sum(piece.shape[1] for piece in pieces), tokens)
    if each == 0 or rest:
        raise ConfigError(
            "a layer does not run once for each token, so that nothing can be probed; probe "
            "another model"
        )
    return torch.cat([*pieces], dim=1)[:, each - 1 :: each]


@contextmanager
def recording(layers: Sequence[Any]) -> Iterator[list[list[torch.Tensor]]]:
    """The outputs of each call of each layer, in the order of the calls."""
    pieces: list[list[torch.Tensor]] = [[] for _ in layers]

    def keep(own: list[torch.Tensor]) -> Any:
        return lambda module, args, output: own.append(
            output[0] if isinstance(output, tuple) else output
        )

    handles = [
        layer.register_forward_hook(keep(own)) for layer, own in zip(layers, pieces, strict=True)
    ]
    try:
        yield pieces
    finally:
        for handle in handles:
            handle.remove()


def _probe(
    states: torch.Tensor,
    labels: torch.Tensor,
    held_out: torch.Tensor,
    held_out_labels: torch.Tensor,
    vocabulary: int,
    hidden: int,
    steps: int,
    seed: int,
) -> float:
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        width = states.shape[1]
        probe = nn.Sequential(
            nn.LayerNorm(width, elementwise_affine=False),
            nn.Linear(width, hidden),
            nn.GELU(),
            nn.Linear(hidden, vocabulary),
        ).to(states.device)
    optimizer = torch.optim.AdamW(probe.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with torch.enable_grad():
        for _ in range(steps):
            chosen = torch.randint(len(labels), (min(256, len(labels)),), generator=generator).to(
                states.device
            )
            loss = nn.functional.cross_entropy(probe(states[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(probe(held_out), held_out_labels))


@inspection("probes", "what each layer knows of the next token", examples(16), BASELINE)
def inspect_probes(run: Path, baseline: Path | None, examples: int) -> str:
    """What probes on each layer know of the next token, of a run and, if given, of another: a table
    and `probes.png`.

    Raises:
        CheckpointError: there is no finished run.
        ConfigError: there are no examples, or the other run is one on another task.
    """
    paths = [run, *([] if baseline is None else [baseline])]
    found, tasks = {}, []
    for name, path in zip(labels([path.name for path in paths], paths), paths, strict=True):
        model, recipe, (train, valid) = batches_of(Experiment(path), examples, "train", "valid")
        tasks.append(recipe.task)
        if recipe.task != tasks[0]:
            raise ConfigError(
                f"{path} learned another task than {run}, so their probes do not compare; give a "
                "run on that"
            )
        found[name] = probe_losses(model, train, valid)
    longest = max(len(losses) for losses in found.values())
    rows = [
        [
            layer,
            *(f"{losses[layer]:.4f}" if layer < len(losses) else "" for losses in found.values()),
        ]
        for layer in range(longest)
    ]
    lines = {name: list(enumerate(losses)) for name, losses in found.items()}
    lines_figure(
        lines, run / "probes.png", "probes that predict the next token", "layer", "loss (nats)"
    )
    return (
        f"{table(['layer', *(f'{name}: loss' for name in found)], rows)}\n\nFigure: "
        f"{run / 'probes.png'}"
    )
