"""A tokenizer with one token a character, for models trained from scratch."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from undertow.errors import ConfigError

_SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}


def ids_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id that a tokenizer may give: the embeddings that a model needs."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """Build a tokenizer whose tokens are `<pad>`, `<eos>`, `<unk>` and the given characters, in
    sorted order.

    It adds no token of its own to a text, decodes what it encoded exactly, and can be saved and
    then loaded with `AutoTokenizer.from_pretrained`. Other characters become `<unk>`, which
    `undertow.lab.tasks.encode` refuses in training data. It pads on the left, as `generate()` wants
    it; `PadCollator` pads on the right for training.

    Raises ConfigError if there are no characters.
    """
    if not characters:
        raise ConfigError(
            "characters is empty, but a tokenizer needs at least one; give it task.characters()."
        )
    vocabulary = {
        token: i for i, token in enumerate([*_SPECIAL.values(), *sorted(set(characters))])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    # Without a decoder, tokens would be joined with blanks.
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **_SPECIAL,
    )
