"""HotpotQA: traces as given or from the released files, an exact match as its authors', and every
malformed row named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from undertow.errors import ConfigError, DataError
from undertow.lab.evaluation.accuracy import accuracy_by_length
from undertow.lab.runs.recipe import ModelSection
from undertow.lab.tasks import Example, HotpotQA, character_tokenizer, encode
from undertow.lab.tasks.encode import IGNORED
from undertow.lab.training.from_scratch import from_scratch

GIVEN = {
    "question": "Who wrote it?",
    "steps": ["It is Hamlet.", "Hamlet is by the Bard."],
    "answer": "The Bard",
}
RELEASED = {
    "_id": "1",
    "question": "Who wrote it?",
    "answer": "The Bard",
    "level": "easy",
    "supporting_facts": [["Hamlet", 1], ["Bard", 0]],
    "context": [
        ["Bard", ["Hamlet is by  the Bard.", "Other."]],
        ["Noise", ["No."]],
        ["Hamlet", ["Skip.", "It is Hamlet."]],
    ],
}
OF_DATASETS = RELEASED | {
    "supporting_facts": {"title": ["Hamlet", "Bard"], "sent_id": [1, 0]},
    "context": {
        "title": ["Bard", "Hamlet"],
        "sentences": [["Hamlet is by the Bard."], ["Skip.", "It is Hamlet."]],
    },
}
PROMPT = "Question: Answer the question.\nInput: Who wrote it?\nAnswer:"
TRACE = "It is Hamlet. Hamlet is by the Bard."


def written(path: Path, *rows: Any) -> str:
    text = (
        json.dumps(rows)
        if path.suffix == ".json"
        else "".join(json.dumps(row) + "\n" for row in rows)
    )
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    "row", [GIVEN, RELEASED, OF_DATASETS], ids=["steps", "released", "datasets"]
)
@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_three_ways_to_use_a_trace(row: Any, ending: str, tmp_path: Path) -> None:
    path = written(tmp_path / f"a.{ending}", row)
    assert HotpotQA(test=path).example("test", 0) == Example(PROMPT, f" {TRACE}\n#### The Bard", 2)
    given = HotpotQA(test=path, trace="given").example("test", 0)
    assert given == Example(PROMPT.replace("it?", f"it?\nReasoning: {TRACE}"), " The Bard", 2)
    assert HotpotQA(test=path, trace="none").example("test", 0) == Example(PROMPT, " The Bard", 0)


def test_the_loss_is_on_trace_and_answer_or_on_the_answer(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", GIVEN)
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    for trace, expected in (
        ("written", f" {TRACE}\n#### The Bard<eos>"),
        ("given", " The Bard<eos>"),
    ):
        item = encode(HotpotQA(test=path, trace=trace).example("test", 0), tokenizer)  # type: ignore[arg-type]
        assert tokenizer.decode([token for token in item["labels"] if token != IGNORED]) == expected


def test_exact_match(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", GIVEN)
    bare, chain = HotpotQA(test=path, trace="given"), HotpotQA(test=path)
    for task, before in ((bare, ""), (chain, "so on\n#### ")):
        example = task.example("test", 0)
        assert task.score(example, example.completion)
        for right in ("The Bard", " the bard.", "BARD", "a 'Bard'\nand so on"):
            assert task.score(example, before + right)
        for wrong in ("", "Bards", "The Bard himself", "no bard", "her\nBard"):
            assert not task.score(example, before + wrong)
    assert not chain.score(chain.example("test", 0), "The Bard"), "without its mark it is no answer"


def test_rows_of_another_level_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [
        RELEASED | {"level": "hard" if i % 3 else "easy", "question": f"{i}?"} for i in range(300)
    ]
    path = written(tmp_path / "a.json", *rows)
    task = HotpotQA(train=path, level="easy")
    assert task.size("train") + task.size("valid") == 100 and task.size("valid") > 0
    assert task.left_out("train") == {"their level is not easy": 200} and not task.left_out("valid")
    assert not HotpotQA(train=path).left_out("train")
    with pytest.raises(
        DataError, match=r"holds no questions \(300 left out: their level is not medium\)"
    ):
        HotpotQA(train=path, level="medium").size("train")
    with pytest.raises(DataError, match="expected a text as 'level'"):
        HotpotQA(train=written(tmp_path / "b.jsonl", GIVEN), level="easy").size("train")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "expected an object with the texts 'question' and 'answer'"),
        ({"question": "?", "answer": " "}, "expected an object with the texts"),
        ({"question": "?", "answer": "a"}, "expected a trace, as 'steps' or as 'supporting_facts'"),
        (GIVEN | {"steps": []}, "expected a list of texts as 'steps'"),
        (GIVEN | {"steps": ["a", 5]}, "expected a list of texts as 'steps'"),
        (
            RELEASED | {"supporting_facts": [["Hamlet", 9]]},
            "the supporting fact 9 of 'Hamlet' is not in the context",
        ),
        (
            RELEASED | {"supporting_facts": [["Macbeth", 0]]},
            "the supporting fact 0 of 'Macbeth' is not in the context",
        ),
        (RELEASED | {"supporting_facts": []}, "there is no supporting fact"),
        (RELEASED | {"context": 5}, "expected a trace"),
    ],
)
def test_a_malformed_row_is_named(row: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"bad\.jsonl, line 2: {message}"):
        HotpotQA(test=written(tmp_path / "bad.jsonl", GIVEN, row)).size("test")
    with pytest.raises(DataError, match=rf"bad\.json, row 1: {message}"):
        HotpotQA(test=written(tmp_path / "bad.json", GIVEN, row)).size("test")


def test_files_that_hold_no_list_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text, message in (
        ("{}", "holds no list"),
        ('{"question": 1}\n{"question": 2}', "Extra data"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            HotpotQA(test=str(path)).size("test")
    with pytest.raises(
        ConfigError, match="trace: expected one of 'written', 'given', 'none', got 'all'"
    ):
        HotpotQA(trace="all")  # type: ignore[arg-type]


def test_tokens_are_scored_beside_whole_answers(tmp_path: Path) -> None:
    task = HotpotQA(
        test=written(tmp_path / "a.jsonl", GIVEN, GIVEN | {"answer": "Me"}), trace="given"
    )
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    torch.manual_seed(0)
    model = from_scratch(ModelSection(width=16, heads=2, positions=256), tokenizer)
    (found,) = accuracy_by_length(model, tokenizer, task)
    right = total = 0
    for index in range(2):
        item = encode(task.example("test", index), tokenizer)
        with torch.no_grad():
            likeliest = (
                model.eval()(torch.tensor([item["input_ids"]])).logits[0, :-1].argmax(-1).tolist()
            )
        pairs = [(a, b) for a, b in zip(likeliest, item["labels"][1:], strict=True) if b != IGNORED]
        right, total = right + sum(a == b for a, b in pairs), total + len(pairs)
    assert (found.right_symbols, found.symbols) == (right, total) and total == len(
        " The Bard"
    ) + len(" Me") + 2
    assert (found.correct, found.total) == (0, 2)
