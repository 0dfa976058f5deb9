"""The character tokenizer: exact round trips, before and after a save."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from undertow.errors import ConfigError
from undertow.lab.tasks import MultiStepArithmetic, Parity, character_tokenizer

ALPHABET = " \n\t01=+-*()ABz.:é☃𝄞"
TOKENIZER = character_tokenizer(ALPHABET)


@given(st.text(ALPHABET))
@settings(deadline=None)
def test_round_trip_is_exact(text):
    ids = TOKENIZER(text)["input_ids"]
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == text


def test_specials_and_padding():
    assert TOKENIZER.convert_ids_to_tokens([0, 1, 2]) == ["<pad>", "<eos>", "<unk>"]
    assert len(TOKENIZER) == 3 + len(set(ALPHABET))
    batch = TOKENIZER(["0", "011"], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["attention_mask"] == [[0, 0, 1], [1, 1, 1]]
    assert (
        TOKENIZER.decode([*batch["input_ids"][0], TOKENIZER.eos_token_id], skip_special_tokens=True)
        == "0"
    )


def test_unknown_characters_become_unk():
    assert TOKENIZER("0Q")["input_ids"][1] == TOKENIZER.unk_token_id


@pytest.mark.parametrize(
    "task", [Parity(), MultiStepArithmetic(template="bare")], ids=lambda task: task.kind
)
def test_saves_and_loads(tmp_path, task):
    built = character_tokenizer(task.characters())
    built.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == built.get_vocab()
    assert loaded.padding_side == "left"
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.unk_token_id) == (0, 1, 2)
    for i in range(20):
        example = task.example("train", i)
        text = example.prompt + example.completion
        assert loaded(text)["input_ids"] == built(text)["input_ids"]
        assert loaded.decode(loaded(text)["input_ids"]) == text


def test_order_and_repeats_do_not_matter():
    assert character_tokenizer("baab").get_vocab() == character_tokenizer("ab").get_vocab()


def test_no_characters():
    with pytest.raises(ConfigError, match="characters is empty"):
        character_tokenizer("")
