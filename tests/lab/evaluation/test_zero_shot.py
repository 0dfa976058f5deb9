"""Zero-shot tasks from local YAML: a base model scores the same with and without a recurrence that
is still zero."""

import json
import os
import re
from pathlib import Path

import pytest
from helpers import hosted, unhosted
from transformers import AutoModelForCausalLM, AutoTokenizer

import undertow
from undertow.cli.main import main
from undertow.errors import ConfigError
from undertow.lab.evaluation.zero_shot import zero_shot_scores
from undertow.lab.tasks import character_tokenizer

pytest.importorskip("lm_eval")

TOKENIZER = character_tokenizer("abcdefghijklmnop ")
# A folder with a pretrained SmolLM2-135M, to compare on a real model.
PRETRAINED = Path(
    os.environ.get(
        "UNDERTOW_SMOLLM2", Path(__file__).parents[3] / "models" / "SmolLM2-135M-Instruct"
    )
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two tasks and their data: continuations, and choices."""
    made = tmp_path / "tasks"
    made.mkdir()
    rows = [
        {"context": f"abc {chr(97 + i)}", "end": "defg"[i % 4] + "h", "wrong": "pon", "gold": i % 2}
        for i in range(9)
    ]
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {made / "rows.jsonl"}}}}}
test_split: test
doc_to_text: "{{{{context}}}}"
target_delimiter: " "
"""
    (made / "ends.yaml").write_text(
        f"task: ends\noutput_type: loglikelihood\ndoc_to_target: '{{{{end}}}}'{common}"
        "metric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false}]\n"
    )
    (made / "choices.yaml").write_text(
        "task: choices\noutput_type: multiple_choice\ndoc_to_choice: ['dead', "
        f"'pond']\ndoc_to_target: gold{common}metric_list: [{{metric: acc, aggregation: mean, "
        "higher_is_better: true}]\n"
    )
    return made


def test_a_zero_recurrence_changes_no_score(folder: Path) -> None:
    tasks = ["ends", "choices"]
    model = unhosted("llama")
    plain = zero_shot_scores(model, TOKENIZER, tasks, folder)
    assert (
        set(plain) == set(tasks)
        and plain["ends"]["perplexity"] > 1
        and 0 <= plain["choices"]["acc"] <= 1
    )
    undertow.attach(model, undertow.T2MLR(1, 2))
    got = zero_shot_scores(model, TOKENIZER, tasks, folder)
    assert got["choices"] == plain["choices"]
    assert got["ends"]["perplexity"] == pytest.approx(plain["ends"]["perplexity"], rel=1e-5)
    other = zero_shot_scores(hosted("llama", "t2mlr-middle"), TOKENIZER, tasks, folder)
    assert other["ends"]["perplexity"] != pytest.approx(plain["ends"]["perplexity"], rel=1e-3), (
        "the control: trained, it does"
    )


def test_what_is_cut_is_counted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = unhosted("llama")
    zero_shot_scores(model, TOKENIZER, ["ends"], folder)
    assert "lm-eval cut" not in caplog.text
    (folder / "rows.jsonl").write_text(
        "".join(
            json.dumps({"context": "ab " * length, "end": "dh"}) + "\n" for length in (3, 80, 90)
        )
    )
    says = (folder / "ends.yaml").read_text().replace("ends", "says").partition("metric_list")[0]
    says = says.replace("output_type: loglikelihood", "output_type: generate_until")
    says += (
        "generation_kwargs: {max_gen_toks: 4, until: ['.']}\nmetric_list: [{metric: exact_match}]\n"
    )
    (folder / "says.yaml").write_text(says)
    for task in ("ends", "says"):
        caplog.clear()
        zero_shot_scores(model, TOKENIZER, [task], folder)
        assert (
            "2 of the prompts have more than the 128 tokens that the model reads: lm-eval cut their"
            in caplog.text
        )


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "saved"
    hosted("llama", "t2mlr-middle").save_pretrained(saved)
    TOKENIZER.save_pretrained(saved)
    common = ["eval", str(saved), "--tasks=ends", f"--tasks-folder={folder}"]
    outputs = []
    for options in ([], ["--prefill=jacobi"], ["--limit=2"]):
        capsys.readouterr()
        assert main([*common, *options]) == 0
        outputs.append(capsys.readouterr().out)
    exact, jacobi, limited = (
        float(re.search(r"\| ends: perplexity \| +([\d.]+) \|", text)[1]) for text in outputs
    )
    assert jacobi == pytest.approx(exact, rel=1e-5), "sixteen sweeps are exact on so few tokens"
    assert limited != pytest.approx(exact, rel=1e-3)
    for arguments, named in (
        ([*common, "--limit=0"], "limit is 0"),
        ([*common, "--batch=0"], "batch is 0"),
        ([*common, "--evaluation.batch=3"], "is a setting of a recipe"),
        (["eval", str(saved), "--tasks=,", f"--tasks-folder={folder}"], "tasks is empty"),
        (["eval", str(saved), "--tasks=ends", f"--tasks-folder={folder / 'x'}"], "is no folder"),
        (
            ["eval", str(tmp_path / "none"), "--tasks=ends", f"--tasks-folder={folder}"],
            "there is no folder",
        ),
    ):
        assert main(arguments) == 2
        assert named in capsys.readouterr().err
    unhosted("llama").save_pretrained(saved)
    assert main([*common, "--prefill=jacobi"]) == 2
    assert "has no recurrence" in capsys.readouterr().err


def test_an_unknown_task_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="there is no zero-shot task 'end'; did you mean 'ends'"):
        zero_shot_scores(unhosted("llama"), TOKENIZER, ["end"], folder)


@pytest.mark.slow
@pytest.mark.skipif(not PRETRAINED.is_dir(), reason=f"there is no pretrained model in {PRETRAINED}")
def test_a_pretrained_model_scores_the_same(folder: Path) -> None:
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(PRETRAINED),
        AutoTokenizer.from_pretrained(PRETRAINED),
    )
    plain = zero_shot_scores(model, tokenizer, ["ends", "choices"], folder)
    undertow.attach(model, undertow.T2MLR.from_paper(13, 18))
    got = zero_shot_scores(model, tokenizer, ["ends", "choices"], folder)
    assert got["choices"] == plain["choices"]
    assert got["ends"]["perplexity"] == pytest.approx(plain["ends"]["perplexity"], rel=1e-4)
