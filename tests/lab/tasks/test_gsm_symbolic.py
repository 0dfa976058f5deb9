"""GSM-Symbolic: drawn by reasoning-gym where that is installed, and a clear sentence where it is
not."""

import sys

import pytest

from undertow.errors import ConfigError, DataError
from undertow.lab.tasks import GSMSymbolic, split_of


def test_without_the_package_the_message_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        ConfigError,
        match=r"gsm_symbolic needs the package reasoning-gym; install it with: pip install",
    ):
        GSMSymbolic().example("train", 0)


class TestWithThePackage:
    @pytest.fixture(autouse=True)
    def _package(self):
        pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")

    def test_examples_are_pure_and_lie_in_their_split(self):
        prompts = {}
        for split in ("train", "valid", "test"):
            examples = [GSMSymbolic(seed=3).example(split, index) for index in range(40)]
            assert examples == [GSMSymbolic(seed=3).example(split, index) for index in range(40)]
            prompts[split] = {example.prompt for example in examples}
            assert all(split_of(prompt) == split for prompt in prompts[split])
        assert GSMSymbolic(seed=4).example("train", 0) != GSMSymbolic(seed=3).example("train", 0)

    def test_layout_and_scores_are_those_of_gsm8k(self):
        plain, chained = GSMSymbolic(), GSMSymbolic(chain_of_thought=True)
        for index in range(60):
            example = plain.example("test", index)
            assert example.prompt.startswith("Question: Answer the math question.\nInput: ")
            assert example.prompt.endswith("\nAnswer:")
            assert plain.score(example, example.completion)
            assert not plain.score(example, f"{example.completion}1")
            steps, mark, answer = chained.example("test", index).completion.rpartition("\n#### ")
            assert (
                mark
                and f" {answer}" == example.completion
                and len(steps.splitlines()) == example.length
            )
            assert chained.score(chained.example("test", index), f"Some steps.\n#### {answer}")
            assert not chained.score(chained.example("test", index), answer)

    def test_a_length_is_a_number_of_steps(self):
        assert GSMSymbolic().example("train", 0, length=4).length == 4
        with pytest.raises(DataError, match="takes 60 steps; ask for 2 to 5"):
            GSMSymbolic().example("train", 0, length=60)
