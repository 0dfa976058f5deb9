"""GSM8K on the real files where they are, and on small ones with every mistake a file can hold."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.errors import ConfigError, DataError
from undertow.lab.tasks import GSM8K, Example

DATA = Path(__file__).resolve().parents[3] / ".." / "shared" / "data"
needs_data = pytest.mark.skipif(
    not (DATA / "gsm8k_train.jsonl").exists(), reason="the GSM8K files are not here"
)

CLIPS = {
    "question": "Natalia sold 48 clips, then half as many. How many in all?",
    "answer": (
        "She sold 48/2 = <<48/2=24>>24 then.\nShe sold 48+24 = <<48+24=1,072>>1,072 now.\n#### "
        "1,072"
    ),
}


def write(path, *rows):
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n", "utf-8"
    )
    return str(path)


@pytest.fixture
def clips(tmp_path):
    return write(tmp_path / "test.jsonl", CLIPS)


def test_prompt_is_the_papers_and_answer_has_no_commas(clips):
    prompt = f"Question: Answer the math question.\nInput: {CLIPS['question']}\nAnswer:"
    assert GSM8K(test=clips).example("test", 0) == Example(prompt, " 1072", 2)


def test_chain_of_thought_with_and_without_calculator_marks(clips):
    plain = GSM8K(test=clips, chain_of_thought=True).example("test", 0).completion
    assert plain == " She sold 48/2 = 24 then.\nShe sold 48+24 = 1,072 now.\n#### 1072"
    marked = (
        GSM8K(test=clips, chain_of_thought=True, calculator_marks=True)
        .example("test", 0)
        .completion
    )
    assert marked == f" {CLIPS['answer'].replace('#### 1,072', '#### 1072')}"


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("name", ["aug.txt", "aug.jsonl"])
def test_augmented_steps_stay_whole(tmp_path, name, marks):
    row = {"question": "Eggs?", "steps": ["<<16-3-4=9>>", "<<9*2=18>>"], "answer": "18"}
    path = write(
        tmp_path / name, row if name.endswith("jsonl") else "Eggs?||<<16-3-4=9>> <<9*2=18>> #### 18"
    )
    task = GSM8K(test=path, chain_of_thought=True, calculator_marks=marks)
    prompt = "Question: Answer the math question.\nInput: Eggs?\nAnswer:"
    assert task.example("test", 0) == Example(prompt, " <<16-3-4=9>> <<9*2=18>>\n#### 18", 2)


def test_score(clips):
    task = GSM8K(test=clips)
    example = task.example("test", 0)
    for right in (" 1072", "1,072", " 1072.00", "\n1072\nQuestion: next"):
        assert task.score(example, right)
    for wrong in (
        "",
        " 1073",
        "-1072",
        "1072 clips",
        "about 1072",
        "10 72",
        "1\n1072",
        "NaN",
        "1072e0",
        "#### 1072",
    ):
        assert not task.score(example, wrong)


def test_score_with_chain_of_thought(clips):
    task = GSM8K(test=clips, chain_of_thought=True)
    example = task.example("test", 0)
    for right in (example.completion, "#### 1,072", "#### 5 no\n#### 1072\nmore"):
        assert task.score(example, right)
    for wrong in ("", "1072", "#### 5", "#### 1072\n#### 5", "1072 ####", "#### 1072 clips"):
        assert not task.score(example, wrong)


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9), st.booleans())
def test_score_compares_numbers(answer, other, chain):
    task = GSM8K(chain_of_thought=chain)
    example = Example("?", f" {answer / 2}" if not chain else f" step\n#### {answer / 2}", 1)
    assert task.score(example, ("#### " if chain else "") + f"{answer / 2:,}")
    assert task.score(example, ("#### " if chain else "") + f"{other / 2:,}") == (answer == other)


def test_valid_split_is_held_out_of_train(tmp_path):
    path = write(
        tmp_path / "t.jsonl",
        *({"question": f"{i % 500}?", "answer": f"#### {i}"} for i in range(1000)),
    )
    task = GSM8K(train=path)
    prompts = {
        split: [task.example(split, i).prompt for i in range(task.size(split))]
        for split in ("train", "valid")
    }
    assert len(prompts["train"]) + len(prompts["valid"]) == 1000
    assert 20 < len(prompts["valid"]) < 100
    assert not set(prompts["train"]) & set(prompts["valid"])
    whole = GSM8K(train=path, valid=path)
    assert whole.size("train") == whole.size("valid") == 1000


def test_changed_file_is_read_again(tmp_path, clips):
    task = GSM8K(test=clips)
    assert task.size("test") == 1
    write(Path(clips), CLIPS, "", CLIPS)
    os.utime(clips, ns=(1, 1))
    assert task.size("test") == 2


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"question": "?", "answer": "no mark 5"}, "after '####', found 'no mark 5'"),
        ({"question": "?", "answer": "steps\n#### "}, "a number as the answer, found ''"),
        ({"question": "?", "answer": "steps\n#### five"}, "found 'five'"),
        ({"question": "?", "answer": "#### 1e5"}, "found '1e5'"),
        ({"question": "?", "answer": 5}, "'answer' is 5 without quotes, but must be a text"),
        ({"question": "?", "answer": ""}, "'answer' is empty"),
        ({"question": " ", "answer": "#### 5"}, "'question' is empty"),
        ({"question": "?"}, "the row has no 'answer', only 'question'"),
        ({}, "the row has no 'question', only nothing at all"),
        ({"question": "?", "answer": "5", "steps": [5]}, r"'steps', found '\[5\]'"),
        ([1, 2], r"found \[1, 2\]"),
        ("version https://example.org/pointer", "expected JSON, found 'version"),
    ],
)
def test_bad_json_row_is_named(tmp_path, row, found):
    task = GSM8K(test=write(tmp_path / "bad.jsonl", CLIPS, row))
    with pytest.raises(DataError, match=rf"bad\.jsonl, line 2: .*{found}"):
        task.size("test")


@pytest.mark.parametrize(
    "row", ["no bars #### 5", "q||<<1+1=2>>", "q||#### many", "q||words #### 5", " ||#### 5"]
)
def test_bad_text_row_is_named(tmp_path, row):
    task = GSM8K(test=write(tmp_path / "bad.txt", "q||<<1+1=2>> #### 2", row))
    with pytest.raises(
        DataError, match=r"bad\.txt, line 2: (expected|the question before '\|\|' is empty)"
    ):
        task.size("test")


def test_missing_and_unreadable_files(tmp_path, clips):
    with pytest.raises(ConfigError, match="needs the field 'train'"):
        GSM8K(test=clips).size("valid")
    with pytest.raises(DataError, match="cannot be read"):
        GSM8K(test=str(tmp_path / "absent.jsonl")).size("test")
    with pytest.raises(DataError, match="cannot be read"):
        GSM8K(test=str(tmp_path)).size("test")
    with pytest.raises(DataError, match="holds no problems"):
        GSM8K(test=write(tmp_path / "empty.jsonl", "")).size("test")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="is UTF-16 text; save it as UTF-8"):
        GSM8K(test=str(tmp_path / "binary.jsonl")).size("test")


def test_bad_arguments(clips):
    task = GSM8K(test=clips)
    with pytest.raises(ConfigError, match="leave length out"):
        task.example("test", 0, 3)
    with pytest.raises(ConfigError, match="The split is 'dev'"):
        task.size("dev")
    for index in (-1, 1):
        with pytest.raises(DataError, match=f"gsm8k example {index}"):
            task.example("test", index)


@needs_data
def test_real_files():
    task = GSM8K(
        train=str(DATA / "gsm8k_train.jsonl"),
        test=str(DATA / "gsm8k_test.jsonl"),
        chain_of_thought=True,
    )
    assert task.size("test") == 1_319
    assert task.size("train") + task.size("valid") == 7_473
    assert 300 < task.size("valid") < 450
    for split in ("valid", "test"):
        for i in range(task.size(split)):
            example = task.example(split, i)
            assert task.score(example, example.completion)
            assert "<<" not in example.completion and example.length >= 1
    assert not task.score(task.example("test", 0), task.example("test", 1).completion)


@needs_data
def test_real_augmented_files():
    aug = GSM8K(
        valid=str(DATA / "gsm8k_aug_valid.txt"),
        test=str(DATA / "gsm8k_aug_test.txt"),
        chain_of_thought=True,
    )
    plain = GSM8K(test=str(DATA / "gsm8k_test.jsonl"))
    assert (aug.size("valid"), aug.size("test")) == (500, 1_319)
    assert aug.example("test", 0).completion == " <<16-3-4=9>> <<9*2=18>>\n#### 18"
    answers = [plain.example("test", i).completion.strip() for i in range(1_319)]
    assert answers == [
        aug.example("test", i).completion.rpartition("#### ")[2] for i in range(1_319)
    ]


# A data set of the hub, which `datasets` reads from a folder as well


@pytest.fixture
def hub(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "gsm8k-aug"
    folder.mkdir()
    for split, count in (("train", 60), ("validation", 3), ("test", 2)):
        rows = [
            {"question": f"{split} {i}?", "steps": [f"<<{i}+1={i + 1}>>"], "answer": str(i + 1)}
            for i in range(count)
        ]
        write(folder / f"{split}.jsonl", *rows)
    return folder


def test_a_hub_data_set_stands_in_for_files(hub, clips):
    task = GSM8K(hub=str(hub), chain_of_thought=True)
    assert [task.size(split) for split in ("train", "valid", "test")] == [60, 3, 2]
    prompt = "Question: Answer the math question.\nInput: validation 2?\nAnswer:"
    assert task.example("valid", 2) == Example(prompt, " <<2+1=3>>\n#### 3", 1)
    mixed = GSM8K(hub=str(hub), test=clips)
    assert [mixed.size(split) for split in ("train", "valid", "test")] == [60, 3, 1]


def test_without_a_validation_split_some_of_train_is_held_out(hub):
    (hub / "validation.jsonl").unlink()
    task = GSM8K(hub=str(hub))
    assert task.size("train") + task.size("valid") == 60 and 0 < task.size("valid") < 12
    prompts = {
        split: {task.example(split, i).prompt for i in range(task.size(split))}
        for split in ("train", "valid")
    }
    assert not prompts["train"] & prompts["valid"]


def test_a_bad_row_of_a_hub_data_set_is_named(hub):
    write(
        hub / "test.jsonl",
        {"question": "a?", "steps": [], "answer": "1"},
        {"question": "b?", "steps": [], "answer": "x"},
    )
    with pytest.raises(
        DataError, match="gsm8k-aug, test row 1: expected a number as the answer, found 'x'"
    ):
        GSM8K(hub=str(hub)).size("test")
    (hub / "test.jsonl").unlink()
    with pytest.raises(
        DataError, match="has no test split, but train, validation; give a file for it"
    ):
        GSM8K(hub=str(hub)).size("test")
    with pytest.raises(DataError, match=r"the data set .*absent cannot be loaded: "):
        GSM8K(hub=str(hub / "absent")).size("test")
