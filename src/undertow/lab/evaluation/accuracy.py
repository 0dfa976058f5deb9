"""Exact-match accuracy by length: of generated answers, or of the labels of a whole sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from undertow.errors import ConfigError, DataError
from undertow.lab.runs.loading import context_of
from undertow.lab.runs.results import Accuracy
from undertow.lab.tasks import Example, PadCollator, Split, Task, model_inputs
from undertow.lab.tasks.encode import IGNORED, encode, encode_prompt


def accuracy_by_length(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    lengths: Sequence[int] = (),
    examples: int = 256,
    batch: int = 128,
    temperature: float = 0.0,
    max_new_tokens: int | None = None,
    split: Split = "test",
    seed: int = 0,
) -> list[Accuracy]:
    """Ask for `examples` answers of each length and score them; without lengths, for those to a
    data set's first ones.

    Answers are generated: prompts are left-padded and generated for `batch` at a time. A
    temperature of 0 is greedy decoding. Where a task has a label at every position, the likeliest
    ones of `batch` teacher-forced sequences are compared at a time; nothing is generated then, so
    `max_new_tokens` and `seed` play no part.

    Raises:
        DataError: the split has no example of a length.
        ConfigError: a temperature for a task with labels, or a task that has neither answers nor
            labels.
    """
    if task.measured_by == "labels" and temperature:
        raise ConfigError(
            f"temperature is {temperature:g}, but nothing is sampled for {task.kind}; leave it out"
        )
    results = []
    for length in lengths or (None,):
        size = task.size(split, tokenizer)
        count = examples if size is None else min(examples, size)
        asked = [task.example(split, index, length) for index in range(count)]
        if task.measured_by == "labels":
            results.append(label_accuracy(model, tokenizer, asked, batch, length))
            continue
        generator_state = torch.random.get_rng_state()
        torch.manual_seed(seed)
        answers = generate(model, tokenizer, asked, batch, temperature, max_new_tokens)
        torch.random.set_rng_state(generator_state)
        correct = sum(
            task.score(example, answer) for example, answer in zip(asked, answers, strict=True)
        )
        found = Accuracy(length, temperature, correct, count)
        if task.scores_tokens and not temperature:
            tokens = label_accuracy(model, tokenizer, asked, batch, length)
            found = replace(found, right_symbols=tokens.right_symbols, symbols=tokens.symbols)
        results.append(found)
    return results


def label_accuracy(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    batch: int,
    length: int | None,
) -> Accuracy:
    """The accuracy of the likeliest label at every position of aligned examples."""
    collate = PadCollator(tokenizer)
    check_context(
        model, examples, [len(encode(example, tokenizer)["input_ids"]) for example in examples]
    )
    correct = right_symbols = symbols = 0
    with evaluating(model):
        for start in progress(range(0, len(examples), batch), "labelling"):
            items = collate(
                [encode(example, tokenizer) for example in examples[start : start + batch]]
            )
            inputs = model_inputs(items, model.device)
            predicted = model(**inputs, use_cache=False).logits[:, :-1].argmax(-1).cpu()
            labels = items["labels"][:, 1:]  # as the loss has it
            labelled = labels != IGNORED
            right = (predicted == labels) & labelled
            correct += int((right.sum(-1) == labelled.sum(-1)).sum())
            right_symbols += int(right.sum())
            symbols += int(labelled.sum())
    return Accuracy(length, 0.0, correct, len(examples), right_symbols, symbols)


def generate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    batch: int,
    temperature: float,
    max_new_tokens: int | None,
) -> list[str]:
    """The texts that the model writes after the prompts, without special tokens; they end where its
    context ends.

    Raises:
        DataError: the tokenizer does not know a part of a prompt, or prompt and right answer are
            more than the model reads.
    """
    prompts = [encode_prompt(example.prompt, tokenizer) for example in examples]
    whole = [len(encode(example, tokenizer)["input_ids"]) for example in examples]
    check_context(model, examples, whole)
    if max_new_tokens is None:
        max_new_tokens = 1 + max(
            all_ - len(prompt) for all_, prompt in zip(whole, prompts, strict=True)
        )
    limit = context_of(model)
    if limit is not None:
        max_new_tokens = min(max_new_tokens, max(1, limit - max(map(len, prompts))))
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    answers: list[str] = []
    with evaluating(model):
        for start in progress(range(0, len(examples), batch), "generating"):
            inputs = tokenizer.pad(
                {"input_ids": prompts[start : start + batch]},
                padding_side="left",
                return_tensors="pt",
            ).to(model.device)
            output = model.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                pad_token_id=tokenizer.pad_token_id,
                use_cache=True,
                **sampling,
            )
            answers += tokenizer.batch_decode(
                output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
            )
    return answers


def check_context(model: Any, examples: Sequence[Example], tokens: Sequence[int]) -> None:
    """Refuse the first example that takes more tokens than the model can read."""
    limit = context_of(model)
    for number, (example, count) in enumerate(zip(examples, tokens, strict=True)):
        if limit is not None and count > limit:
            raise DataError(
                f"example {number}, {example.prompt[:80]!r}, takes {count} tokens with its answer, "
                f"but the model reads {limit} at most; leave it out, or take a model that reads "
                "more"
            )


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode without gradients, in which states are exact unless a prefill solver is set;
    then the mode before."""
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(training)


def progress(batches: Sequence[int], description: str) -> Iterable[int]:
    """The batches, with a progress bar if there are several."""
    bar: Iterable[int] = tqdm(
        batches, desc=description, unit="batch", leave=False, disable=len(batches) < 3
    )
    return bar
