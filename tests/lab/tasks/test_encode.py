"""Encoding: masks, prefixes, limits, padding, also with a subword tokenizer that adds tokens of its
own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from undertow.errors import ConfigError, DataError
from undertow.lab.tasks import (
    GSM8K,
    Example,
    MultiStepArithmetic,
    PadCollator,
    Parity,
    TaskDataset,
    character_tokenizer,
    encode,
    encode_prompt,
)

PARITY = Parity(max_length=12)
CHARACTERS = character_tokenizer(PARITY.characters())


def subword_tokenizer(post: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer as language models have it, with `post` such as '<s> $A' around a
    text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    texts = [
        e.prompt + e.completion
        for e in (MultiStepArithmetic().example("train", i) for i in range(50))
    ]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=post, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="</s>"
    )


TOKENIZERS = {post: subword_tokenizer(post) for post in ("$A", "<s> $A", "<s> $A </s>")}


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_prompt_is_masked_and_completion_ends_with_eos(index):
    example = PARITY.example("train", index)
    item = encode(example, CHARACTERS)
    border = len(example.prompt)
    assert len(item["input_ids"]) == len(item["labels"]) == border + 3
    assert item["labels"][:border] == [-100] * border
    assert item["labels"][border:] == item["input_ids"][border:]
    assert CHARACTERS.decode(item["input_ids"]) == f"{example.prompt}{example.completion}<eos>"


@pytest.mark.parametrize("post", TOKENIZERS)
def test_prompt_at_generation_is_a_prefix_of_training(post):
    tokenizer = TOKENIZERS[post]
    for i in range(20):
        example = MultiStepArithmetic().example("train", i)
        item, prompt = encode(example, tokenizer), encode_prompt(example.prompt, tokenizer)
        assert item["input_ids"][: len(prompt)] == prompt
        assert prompt == tokenizer(example.prompt)["input_ids"][: len(prompt)]
        assert (prompt[0] == tokenizer.bos_token_id) == post.startswith("<s>")
        labelled = [label for label in item["labels"] if label != -100]
        assert tokenizer.decode(labelled) == example.completion + "</s>"
        assert item["input_ids"].count(tokenizer.eos_token_id) == 1


def test_no_token_spans_the_border():
    """'Answer:' and ' 1' stay apart even where the tokenizer would join the whole text
    otherwise."""
    tokenizer = TOKENIZERS["$A"]
    item = encode(Example("Answ", "er: 1", 1), tokenizer)
    together = tokenizer("Answer: 1")["input_ids"]
    assert item["input_ids"][:-1] != together
    assert tokenizer.decode(item["input_ids"][:-1]) == tokenizer.decode(together)


def test_too_long_is_an_error_and_names_the_example():
    example = PARITY.example("train", 0, 12)
    tokens = len(encode(example, CHARACTERS)["input_ids"])
    assert encode(example, CHARACTERS, max_tokens=tokens) == encode(example, CHARACTERS)
    with pytest.raises(
        DataError, match=f"Output the parity.* has {tokens} tokens, but max_tokens is {tokens - 1}"
    ):
        encode(example, CHARACTERS, max_tokens=tokens - 1)


def test_unknown_text_is_an_error():
    bare = character_tokenizer(Parity(template="bare").characters())
    with pytest.raises(DataError, match="does not know a part of 'Question"):
        encode(PARITY.example("train", 0), bare)
    with pytest.raises(DataError, match="does not know a part of ' 2'"):
        encode(Example("01=", " 2", 2), bare)
    # A vocabulary whose unknown token is its EOS token, as in GPT-2, is no reason to refuse
    # anything.
    encode(Example("é", "</s>", 1), TOKENIZERS["$A"])


def test_tokenizer_without_eos():
    tokenizer = character_tokenizer("01 ")
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="EOS"):
        encode(Example("0", "1", 1), tokenizer)
    tokenizer.pad_token = None
    with pytest.raises(ConfigError, match="neither a padding nor an EOS"):
        PadCollator(tokenizer)


def test_dataset_is_a_resumable_stream():
    whole = TaskDataset(PARITY, "train", CHARACTERS, count=20)
    rest = TaskDataset(PARITY, "train", CHARACTERS, count=8, start=12)
    assert [*whole][12:] == [*rest]
    assert len(whole) == 20 and whole[3] == encode(PARITY.example("train", 3), CHARACTERS)
    assert rest.example(0) == PARITY.example("train", 12)
    # Characters are the tokens of this tokenizer, plus one EOS.
    assert [length + 1 for length in whole.lengths()] == [len(item["input_ids"]) for item in whole]


def test_dataset_limits(tmp_path):
    limit = len(encode(PARITY.example("train", 0, 6), CHARACTERS)["input_ids"])
    short = [i for i in range(40) if PARITY.example("train", i).length <= 6]
    assert 0 < len(short) < 40
    kept = TaskDataset(PARITY, "train", CHARACTERS, count=40, max_tokens=limit, overlong="skip")
    assert (
        list(kept.indices) == short and kept.skipped == 40 - len(short) and len(kept) == len(short)
    )
    assert kept[0] == encode(PARITY.example("train", short[0]), CHARACTERS)
    strict = TaskDataset(PARITY, "train", CHARACTERS, count=40, max_tokens=limit)
    bad = next(i for i in range(40) if i not in short)
    with pytest.raises(
        DataError, match=f"parity train example {bad} has .* but at most {limit} may"
    ):
        strict[bad]
    assert strict.skipped == 0


def test_dataset_bounds(tmp_path):
    path = tmp_path / "three.txt"
    path.write_text("a||<<1+1=2>> #### 2\n" * 3)
    task, tokenizer = GSM8K(test=str(path)), TOKENIZERS["<s> $A"]
    assert len(TaskDataset(task, "test", tokenizer)) == 3
    assert len(TaskDataset(task, "test", tokenizer, start=1)) == 2
    for arguments in (
        {"count": 4},
        {"count": 3, "start": 1},
        {"start": -1},
        {"count": -1},
        {"start": 4},
    ):
        with pytest.raises(ConfigError, match="test split of gsm8k holds 3"):
            TaskDataset(task, "test", tokenizer, **arguments)
    with pytest.raises(ConfigError, match="count is missing"):
        TaskDataset(PARITY, "train", CHARACTERS)
    with pytest.raises(ConfigError, match="overlong is 'drop'"):
        TaskDataset(PARITY, "train", CHARACTERS, count=1, overlong="drop")
    with pytest.raises(IndexError):
        TaskDataset(PARITY, "train", CHARACTERS, count=1)[1]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(1, 16))
@settings(max_examples=40, deadline=None)
def test_collator_pads_on_the_right(lengths, multiple):
    items = [
        encode(PARITY.example("train", i, length), CHARACTERS) for i, length in enumerate(lengths)
    ]
    batch = PadCollator(CHARACTERS, pad_to_multiple=multiple)(items)
    tokens = batch["input_ids"].shape[1]
    longest = max(len(item["input_ids"]) for item in items)
    assert longest <= tokens < longest + multiple and tokens % multiple == 0
    for row, item in enumerate(items):
        n = len(item["input_ids"])
        assert batch["input_ids"][row, :n].tolist() == item["input_ids"]
        assert batch["labels"][row, :n].tolist() == item["labels"]
        assert batch["attention_mask"][row].tolist() == [1] * n + [0] * (tokens - n)
        assert (batch["input_ids"][row, n:] == CHARACTERS.pad_token_id).all()
        assert (batch["labels"][row, n:] == -100).all()
    assert all(tensor.dtype == torch.long for tensor in batch.values())


def test_collator_without_pad_token_and_with_a_data_loader():
    tokenizer = TOKENIZERS["<s> $A"]
    data = TaskDataset(MultiStepArithmetic(), "train", tokenizer, count=6)
    batches = list(
        torch.utils.data.DataLoader(data, batch_size=3, collate_fn=PadCollator(tokenizer))
    )
    assert len(batches) == 2
    for batch in batches:
        assert (batch["input_ids"][batch["attention_mask"] == 0] == tokenizer.eos_token_id).all()
    with pytest.raises(ConfigError, match="pad_to_multiple is 0"):
        PadCollator(tokenizer, pad_to_multiple=0)
