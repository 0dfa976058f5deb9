"""Discriminative filtering and expected accuracy: what probabilities say beyond the first choice
(TurboConn, 4.7)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from undertow.errors import ConfigError
from undertow.lab.evaluation.figures import lines_figure
from undertow.lab.inspections.inspection import examples, inspection
from undertow.lab.inspections.looking import of_run
from undertow.lab.runs.run import Experiment
from undertow.lab.study.study import runs_in
from undertow.lab.tables import spread, table
from undertow.lab.tasks import Example, PadCollator, Split, Task, encode

THRESHOLD = 0.001
"""The probability under which a choice counts as eliminated, as in the paper."""
TEMPERATURES = (1.0, 0.01)
"""Those at which the paper samples: 1 but for the experiments with a chain of thought."""


@dataclass(frozen=True)
class Choices:
    """How a model spreads probability over the possible answers of one length.

    Attributes:
        length: the task's own size; None for a whole data set, or the lengths of the training.
        examples: how many prompts were asked.
        eliminated: choices with a probability under the threshold, on average.
        right_eliminated: share of the prompts whose right answer is among them.
        greedy: share of the prompts whose right answer, and its end, is the most probable token by
            token.
        expected: by temperature, the probability of the right answer and its end when sampling, on
            average: the accuracy to expect, without the noise of drawing.
    """

    length: int | None
    examples: int
    eliminated: float
    right_eliminated: float
    greedy: float
    expected: dict[float, float]


def measure_choices(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    lengths: Sequence[int] = (),
    examples: int = 256,
    batch: int = 16,
    threshold: float = THRESHOLD,
    temperatures: Sequence[float] = TEMPERATURES,
    split: Split = "test",
) -> list[Choices]:
    """Probabilities of every possible answer of a task, from one forward pass a prompt.

    Raises:
        ConfigError: the task has no fixed choices, or the tokenizer writes them in several
            differing tokens.
        DataError: the split has no example of a length.
    """
    if not task.choices():
        raise ConfigError(
            f"the answers of {task.kind} are not one of a few choices; use arithmetic or parity"
        )
    training = model.training
    model.eval()
    try:
        return [
            measure_length(
                model, tokenizer, task, length, examples, batch, threshold, temperatures, split
            )
            for length in lengths or (None,)
        ]
    finally:
        model.train(training)


def measure_length(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    length: int | None,
    examples: int,
    batch: int,
    threshold: float,
    temperatures: Sequence[float],
    split: Split,
) -> Choices:
    size = task.size(split, tokenizer)
    count = examples if size is None else min(examples, size)
    asked = [task.example(split, index, length) for index in range(count)]
    eliminated = right_eliminated = greedy = 0
    expected = dict.fromkeys(temperatures, 0.0)
    for example, ids, logits in answer_logits(model, tokenizer, asked, batch):
        place, tokens = differing_tokens(tokenizer, task.choices(), example)
        # Of a choice: the probability of what all of them begin with, such as a blank, and of its
        # own token after that.
        logs = logits.log_softmax(-1)
        before = logs[range(place), ids[:place]].sum()
        probabilities = (before + logs[place, tokens]).exp()
        eliminated += int((probabilities < threshold).sum())
        right_eliminated += bool(
            probabilities[task.choices().index(example.completion.strip())] < threshold
        )
        greedy += bool((logits.argmax(-1) == ids).all())
        for temperature in temperatures:
            cooled = (logits / temperature).log_softmax(-1)
            expected[temperature] += float(cooled[range(len(ids)), ids].sum().exp())
    return Choices(
        length,
        count,
        eliminated / count,
        right_eliminated / count,
        greedy / count,
        {temperature: total / count for temperature, total in expected.items()},
    )


def answer_logits(
    model: Any, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], batch: int
) -> Iterator[tuple[Example, torch.Tensor, torch.Tensor]]:
    """Each example with its completion's token ids ``[N]``, the end token last, and the logits
    ``[N, V]`` for them."""
    collate = PadCollator(tokenizer)
    starts = range(0, len(examples), batch)
    for start in tqdm(starts, desc="reading", unit="batch", leave=False, disable=len(starts) < 3):
        part = examples[start : start + batch]
        inputs = {
            name: value.to(model.device)
            for name, value in collate([encode(e, tokenizer) for e in part]).items()
        }
        labels = inputs.pop("labels")
        with torch.inference_mode():
            logits = model(**inputs, use_cache=False).logits
        for row, example in enumerate(part):
            places = (labels[row] >= 0).nonzero()[:, 0]
            yield example, labels[row, places].cpu(), logits[row, places - 1].double().cpu()


def differing_tokens(
    tokenizer: PreTrainedTokenizerBase, choices: Sequence[str], example: Example
) -> tuple[int, torch.Tensor]:
    """Where in a completion the choices differ, and the token of each of them there.

    Raises:
        ConfigError: they differ in more than one token.
    """
    blanks = example.completion[: len(example.completion) - len(example.completion.lstrip())]
    written = [
        tokenizer(blanks + choice, add_special_tokens=False)["input_ids"] for choice in choices
    ]
    if len({tuple(ids[:-1]) for ids in written}) > 1:
        raise ConfigError(
            f"this tokenizer writes the choices {', '.join(choices)} in more than one token each"
        )
    return len(written[0]) - 1, torch.tensor([ids[-1] for ids in written])


@dataclass(frozen=True)
class Chosen:
    """What the seeds of one run were found to choose.

    Attributes:
        run: its name.
        choices: how many possible answers its task has.
        by_seed: for each seed one entry a length.
    """

    run: str
    choices: int
    by_seed: Sequence[Sequence[Choices]]


def choices_table(found: Sequence[Chosen]) -> str:
    """One row for each length of each run: the mean over seeds, with the lowest and the highest."""
    temperatures = found[0].by_seed[0][0].expected
    header = [
        "run",
        "seeds",
        "length",
        "of",
        "choices",
        "eliminated",
        "right one among them",
        "greedy",
    ]
    rows = []
    for one in found:
        for seeds in zip(*one.by_seed, strict=True):
            rows.append(
                [
                    one.run,
                    len(seeds),
                    "all" if seeds[0].length is None else seeds[0].length,
                    sum(seed.examples for seed in seeds),
                    one.choices,
                    spread([seed.eliminated for seed in seeds], "{:.3f}".format),
                    spread([seed.right_eliminated for seed in seeds]),
                    spread([seed.greedy for seed in seeds]),
                    *(
                        spread([seed.expected[temperature] for seed in seeds])
                        for temperature in temperatures
                    ),
                ]
            )
    return table([*header, *(f"expected at {temperature:g}" for temperature in temperatures)], rows)


@inspection(
    "choices",
    "how many possible answers a model rules out, and the accuracy to expect when sampling",
    examples(256),
    together=True,
)
def inspect_choices(paths: Sequence[Path], examples: int) -> str:
    """How the models of several runs spread probability over the possible answers: a table like the
    paper's Table 4.

    One row a run and length, over its seeds. A study's folder stands for its runs. Each seed's
    folder gets `choices.json`, and each run that was tested by length the figure `choices.png`.

    Raises:
        CheckpointError: there is no finished run.
        ConfigError: a task has no fixed choices, or there are no examples.
    """
    table_rows = []
    for run in [run for path in paths for run in runs_in(path)]:
        by_seed: dict[str, list[Choices]] = {}
        for seed in Experiment(run).runs:
            recipe, model, tokenizer = of_run(seed, examples)
            by_seed[seed.name] = found = measure_choices(
                model, tokenizer, recipe.task, recipe.evaluation.lengths, examples
            )
            seed.write_results("choices.json", found)
        if recipe.evaluation.lengths:
            lines = {n: [(c.length or 0, c.eliminated) for c in f] for n, f in by_seed.items()}
            unit = f"{recipe.task.kind}: length"
            measure = f"choices with a probability under {THRESHOLD}"
            lines_figure(lines, run / "choices.png", recipe.name, unit, measure, marked=True)
        table_rows.append(Chosen(recipe.name, len(recipe.task.choices()), list(by_seed.values())))
    return choices_table(table_rows)
