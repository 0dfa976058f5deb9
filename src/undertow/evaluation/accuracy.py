"""Exact-match accuracy of generated answers, by length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from undertow.tasks import Example, Split, Task
from undertow.tasks.encode import encode, encode_prompt


@dataclass(frozen=True)
class Accuracy:
    """How many answers of one length were right.

    Attributes:
        length: the task's own size; None for a whole data set.
        temperature: of the sampling; 0 for greedy answers.
    """

    length: int | None
    temperature: float
    correct: int
    total: int

    @property
    def share(self) -> float:
        return self.correct / self.total


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
    """Generate an answer to `examples` prompts of each length and score them; without lengths, to a data set's first ones.

    Prompts are left-padded and generated for `batch` at a time. A temperature of 0 is greedy decoding.

    Raises:
        DataError: the split has no example of a length.
    """
    results = []
    for length in lengths or (None,):
        size = task.size(split)
        count = examples if size is None else min(examples, size)
        asked = [task.example(split, index, length) for index in range(count)]
        generator_state = torch.random.get_rng_state()
        torch.manual_seed(seed)
        answers = generate(model, tokenizer, asked, batch, temperature, max_new_tokens)
        torch.random.set_rng_state(generator_state)
        correct = sum(task.score(example, answer) for example, answer in zip(asked, answers, strict=True))
        results.append(Accuracy(length, temperature, correct, count))
    return results


def generate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    batch: int,
    temperature: float,
    max_new_tokens: int | None,
) -> list[str]:
    """The texts that the model writes after the prompts, without special tokens."""
    prompts = [encode_prompt(example.prompt, tokenizer) for example in examples]
    if max_new_tokens is None:
        whole = [len(encode(example, tokenizer)["input_ids"]) for example in examples]
        max_new_tokens = 1 + max(all_ - len(prompt) for all_, prompt in zip(whole, prompts, strict=True))
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    answers: list[str] = []
    training = model.training
    model.eval()
    starts = range(0, len(examples), batch)
    with torch.inference_mode():
        for start in tqdm(starts, desc="generating", unit="batch", leave=False, disable=len(starts) < 3):
            inputs = tokenizer.pad(
                {"input_ids": prompts[start : start + batch]}, padding_side="left", return_tensors="pt"
            ).to(model.device)
            output = model.generate(
                **inputs, max_new_tokens=max_new_tokens, pad_token_id=tokenizer.pad_token_id, use_cache=True, **sampling
            )
            answers += tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    model.train(training)
    return answers
