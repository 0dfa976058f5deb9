"""Low-rank adapters on a pretrained model, beside a recurrence that is trained whole."""

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from undertow.errors import ConfigError
from undertow.lab.runs.recipe import ModelSection
from undertow.lab.tasks import character_tokenizer
from undertow.lab.training import train
from undertow.lab.training.build import build
from undertow.lab.training.from_scratch import from_scratch

IDS = torch.tensor([[3, 4, 4, 5, 3, 1, 4, 4]])


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny pretrained models of two architectures, one with `Linear` and one with `Conv1D`
    layers."""
    folder = tmp_path_factory.mktemp("bases")
    tokenizer = character_tokenizer("01=")
    for architecture in ("llama", "gpt2"):
        torch.manual_seed(1)
        section = ModelSection(architecture=architecture, width=16, heads=2, positions=64)
        from_scratch(section, tokenizer).save_pretrained(folder / architecture)
        tokenizer.save_pretrained(folder / architecture)
    return folder


def adapted(base: Path, recurrence: dict[str, Any] | None = tiny.T2MLR, **lora: Any) -> Any:
    recipe = tiny.recipe(
        base, model={"path": str(base)}, recurrence=recurrence, lora={"rank": 4} | lora
    )
    return build(recipe, seed=0)[0]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    output: torch.Tensor = model.eval()(input_ids=IDS).logits
    return output


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "recurrence", [tiny.TURBOCONN, tiny.T2MLR, None], ids=["turboconn", "t2mlr", "plain"]
)
def test_base_is_frozen_and_the_recurrence_is_trained_whole(
    bases: Path, architecture: str, recurrence: Any
) -> None:
    model = adapted(bases / architecture, recurrence)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    adapters = {name for name in trained if "lora_" in name}
    assert adapters
    assert not any("recurrence" in name for name in adapters)
    assert all(".recurrence.modules_to_save." in name for name in trained - adapters)
    assert bool(trained - adapters) == (recurrence is not None)
    assert not any("modules_to_save" in name or "lora_" in name for name in frozen)
    # Every linear layer of every decoder layer but the head's, and each twice: A and B.
    assert len(adapters) == 2 * 2 * {"llama": 7, "gpt2": 4}[architecture]
    assert not any("lm_head" in name for name in adapters)


def test_targets_can_be_chosen(bases: Path) -> None:
    model = adapted(bases / "llama", targets=["q_proj"])
    adapters = {name for name, _ in model.named_parameters() if "lora_" in name}
    assert len(adapters) == 4 and all(".q_proj." in name for name in adapters)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (
            "q_prj",
            "lora.targets names 'q_prj', but the linear layers of the base model are .*; did you "
            "mean 'q_proj'?",
        ),
        (
            "gates",
            "lora.targets names 'gates', but the linear layers of the base model are",
        ),  # of the recurrence
    ],
)
def test_a_target_that_the_base_model_lacks_is_refused(
    bases: Path, target: str, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        adapted(bases / "llama", targets=["k_proj", target])


def test_adapters_start_as_nothing_and_merge_exactly(bases: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(bases / "llama")
    model = adapted(bases / "llama")
    torch.testing.assert_close(logits(model), logits(base))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    before = logits(model)
    assert (before - logits(base)).abs().max() > 0.1
    merged = copy.deepcopy(model).merge_and_unload()
    torch.testing.assert_close(logits(merged), before, rtol=1e-4, atol=1e-4)
    assert not any("lora" in name or "modules_to_save" in name for name in merged.state_dict())


def test_a_run_trains_adapters_and_recurrence_and_saves_the_merged_model(
    bases: Path, tmp_path: Path
) -> None:
    recipe = tiny.recipe(
        tmp_path, model={"path": str(bases / "llama")}, recurrence=tiny.T2MLR, lora={"rank": 4}
    )
    folder = train(recipe, seed=0)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    base = AutoModelForCausalLM.from_pretrained(bases / "llama").state_dict()
    state = model.state_dict()
    start = build(recipe, seed=0)[0].merge_and_unload().state_dict()
    assert state.keys() == start.keys() > base.keys()
    moved = {name for name in state if not torch.equal(state[name], start[name])}
    assert {name for name in moved if ".recurrence." in name} == {
        name for name in state if ".recurrence." in name
    }
    assert any("q_proj" in name for name in moved)
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(state[name], base[name]), f"{name} is not adapted and must stay"
    start_entry = tiny.read_log(folder / "log.jsonl")[0]
    assert 0 < start_entry["trainable_parameters"] < start_entry["parameters"]
