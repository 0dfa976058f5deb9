"""From examples to token ids."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from undertow.errors import ConfigError, DataError
from undertow.lab.tasks.example import Example

IGNORED = -100
"""The label of tokens that carry no loss, as in torch.nn.functional.cross_entropy."""


def encode_prompt(prompt: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the prompt's token ids as the model sees them when it generates.

    Whatever the tokenizer puts in front (a BOS token) stays; an EOS token that it appends is
    removed. Raises DataError if the tokenizer does not know a part of the prompt.
    """
    ids = known_ids(prompt, tokenizer, add_special_tokens=True)
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def encode(
    example: Example, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None = None
) -> dict[str, list[int]]:
    """Return `input_ids` and `labels` of an example: prompt, completion, EOS; the prompt's labels
    are masked.

    Prompt and completion are tokenised apart and then joined, so that no token spans the border and
    the prompt's tokens at generation (`encode_prompt`) are a prefix of the training sequence.
    Labels are not shifted: a causal language model scores its output at position t against the
    label of position t + 1.

    An aligned example becomes its prompt and EOS, with the label of symbol t at position t + 1, so
    that what the model says where it has read symbol t is scored against that symbol's own label.
    Where there are fewer labels than symbols, they belong to the last ones.

    Raises DataError for an example of more than `max_tokens` tokens (nothing is ever cut), for text
    that the tokenizer does not know, and for an aligned example of whose symbols it does not make a
    token each; ConfigError for a tokenizer without an EOS token.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "The tokenizer has no EOS token, but completions must end with one; set its eos_token."
        )
    prompt = encode_prompt(example.prompt, tokenizer)
    answer = known_ids(example.completion, tokenizer, add_special_tokens=False)
    if example.aligned:
        if len(prompt) != len(example.prompt) or not 0 < len(answer) == len(
            example.completion
        ) <= len(prompt):
            raise DataError(
                "The tokenizer does not make one token of each symbol of "
                f"{_shown(example.prompt)}, which has a label for each; use one with a token a "
                "character."
            )
        input_ids = [*prompt, tokenizer.eos_token_id]
        labels = [IGNORED] * (len(input_ids) - len(answer)) + answer
    else:
        completion = [*answer, tokenizer.eos_token_id]
        input_ids, labels = prompt + completion, [IGNORED] * len(prompt) + completion
    tokens = len(input_ids)
    if max_tokens is not None and tokens > max_tokens:
        raise DataError(
            f"The example with the prompt {_shown(example.prompt)} has {tokens} tokens, but "
            f"max_tokens is {max_tokens}; raise it, or leave such examples out."
        )
    return {"input_ids": input_ids, "labels": labels}


def known_ids(text: str, tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool) -> list[int]:
    """Return the text's token ids; raises DataError if the tokenizer does not know a part of it."""
    return check_known(
        text, tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"], tokenizer
    )


def check_known(text: str, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids, made of the text; raises DataError if the tokenizer did not know a part of
    it."""
    # Many byte-level tokenizers name their BOS or EOS token as the unknown one too, and never need
    # it.
    unknown = {tokenizer.unk_token_id} - {tokenizer.bos_token_id, tokenizer.eos_token_id}
    if unknown.intersection(ids):
        raise DataError(
            f"The tokenizer does not know a part of {_shown(text)}; use one built with all "
            "characters of the task."
        )
    return ids


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "...")
