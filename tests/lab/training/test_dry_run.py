"""`undertow train --dry-run` on the full-scale recipes and tiny ones: counts against hand
computations, no files written."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import tiny
import torch
from transformers import LlamaConfig

from undertow.cli.main import main
from undertow.errors import ConfigError, DataError
from undertow.lab.runs.loading import load_tokenizer
from undertow.lab.runs.recipe import Recipe, load_recipe
from undertow.lab.study.settings import Study
from undertow.lab.tasks import Text, character_tokenizer
from undertow.lab.training.build import build, count_parameters, outline, tokenizer_for
from undertow.lab.training.dry_run import dry_run, estimate
from undertow.mapping import from_mapping, load_yaml
from undertow.solvers import Jacobi, Scan, Sequential

RECIPES = Path(__file__).parents[3] / "recipes"
FUSION = 5 * 576**2 + 2 * 576 + 2
# SmolLM2-135M has 134,515,008 parameters; 584 wide it has 136,383,272.
PARAMETERS = {
    "t2mlr-135m-13-18": 134_515_008 + FUSION,
    "t2mlr-135m-9-22": 134_515_008 + FUSION,
    "t2mlr-135m-1-30": 134_515_008 + FUSION,
    "t2mlr-135m-baseline": 136_383_272,
    "t2mlr-135m-loop-1-30x2": 136_383_272,
    "t2mlr-135m-loop-9-22x3": 136_383_272,
    "t2mlr-135m-pause": 136_383_272 + 584,
    "t2mlr-370m-9-24": 361_821_120 + 5 * 960**2 + 2 * 960 + 2,
    "t2mlr-370m-baseline": 367_851_472,
    "t2mlr-1b-9-24": 983_144_000 + 5 * 1600**2 + 2 * 1600 + 2,
    "t2mlr-1b-baseline": 997_891_160,
}


@pytest.fixture
def local(tmp_path: Path) -> list[str]:
    """Overrides that put a small local text and tokenizer in the place of what a full-scale recipe
    names."""
    text = "".join(f"line {number} of some text\n" for number in range(4000))
    (tmp_path / "text.txt").write_text(text)
    character_tokenizer(text).save_pretrained(tmp_path / "tokenizer")
    files = [
        "--task.hub=null",
        f"--task.files=[{tmp_path / 'text.txt'}]",
        f"--task.cache={tmp_path / 'tokens'}",
    ]
    return [*files, f"--model.tokenizer={tmp_path / 'tokenizer'}"]


def test_every_full_scale_recipe_is_checked() -> None:
    assert {path.stem for path in RECIPES.glob("t2mlr-*.yaml")} == set(PARAMETERS)
    for name in PARAMETERS:  # by name: what is trained on is streamed, packed and kept
        task = load_recipe(RECIPES / f"{name}.yaml", []).task
        assert isinstance(task, Text) and task.hub and task.cache and task.context == 2048


def test_openmath_retrofit(tmp_path: Path) -> None:
    """SmolLM2-1.7B-Instruct's shape with T²MLR(5, 20), on rows as released; epochs count what is
    short enough."""
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz: ")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + m['content'] + eos_token }}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path)
    shape = {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
    }
    shape["max_position_embeddings"] = 8192
    LlamaConfig(vocab_size=49152, tie_word_embeddings=True, **shape).save_pretrained(tmp_path)
    rows = [
        {"problem": f"{'a' * (i % 26)}", "generated_solution": "b" * (5000 if i == 3 else 9)}
        for i in range(600)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = [
        f"--model.path={tmp_path}",
        "--task.hub=null",
        f"--task.train={tmp_path / 'chats.jsonl'}",
    ]
    recipe = load_recipe(RECIPES / "smollm2-1.7b-t2mlr-openmath.yaml", given)
    found = estimate(recipe, outline(recipe), load_tokenizer(str(tmp_path)))
    assert found.parameters == found.trained == 1_711_376_384 + 5 * 2048**2 + 2 * 2048 + 2
    assert found.left_out == 1 / 32 and found.size is not None and 300 < found.size < 600
    steps = math.ceil(found.size * 31 / 32 / 256)
    assert found.total_tokens == pytest.approx(steps * 256 * found.tokens) and found.tokens < 100
    text = dry_run(recipe)
    assert "3 %" in text and f"{found.size:,}" in text


@pytest.mark.parametrize("name", PARAMETERS)
def test_full_scale_recipes(name: str, local: list[str]) -> None:
    recipe = load_recipe(RECIPES / f"{name}.yaml", local)
    tokenizer = tokenizer_for(recipe)
    model = outline(recipe)
    assert all(parameter.is_meta for parameter in model.parameters())
    found = estimate(recipe, model, tokenizer)
    assert found.parameters == found.trained == PARAMETERS[name]
    each = 2 if "pause" in name else 1
    assert found.tokens == 2048 * each and found.total_tokens == pytest.approx(
        1e10 * each, rel=1e-3
    )
    assert found.weights == 16 * PARAMETERS[name]
    assert recipe.training.batch * recipe.training.accumulate == 256
    assert not (Path(recipe.task.cache)).exists(), "a look must not tokenize everything"  # type: ignore[union-attr]
    costs = found.training / found.forward
    if any(kind in name for kind in ("baseline", "pause", "loop")):
        assert costs == pytest.approx(3)
    else:  # 17 runs of the block forwards, 5 backwards, for a share of the layers
        assert 3 < costs < 17 + 2 * 5


@pytest.mark.parametrize(("name", "devices"), [("t2mlr-1b-8-gpus", 8), ("t2mlr-1b-64-gpus", 64)])
def test_recipes_for_many_gpus(name: str, devices: int, tmp_path: Path, local: list[str]) -> None:
    """The batches and the model of the recipe for one, a share of each on every device."""
    text = f"--task={{kind: text, files: [{tmp_path / 'text.txt'}], context: 2048}}"
    recipe = load_recipe(RECIPES / "gpu" / f"{name}.yaml", [text, local[-1]])
    one = load_recipe(RECIPES / "t2mlr-1b-9-24.yaml", [text, local[-1]])
    assert recipe.training.batch * recipe.training.accumulate == 256
    same = dataclasses.replace(
        recipe.training, batch=4, accumulate=64, sharding="none", compile="none"
    )
    assert dataclasses.replace(recipe, name=one.name, training=same) == one
    weights = 16 * PARAMETERS["t2mlr-1b-9-24"]
    for said, share in ((dry_run(recipe, devices), devices), (dry_run(recipe), 1)):
        cells = [[cell.strip() for cell in line.split("|")] for line in said.splitlines()]
        found = {line[1]: line[2] for line in cells if len(line) > 3}
        assert found["weights, gradients, AdamW"] == f"{weights / share / 2**30:.2f} GiB"
        assert found["devices"] == str(share)


def test_time_and_activations_are_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("undertow.lab.training.dry_run.DEVICES", {"slow": {"fp32": 1e-14}})
    recipe = tiny.recipe(tmp_path, training={"batch": 4})
    one, two = (dry_run(recipe, devices).splitlines() for devices in (1, 2))
    assert [line for line in one if "weights," in line] == [
        line for line in two if "weights," in line
    ], "each has all of them unless they are sharded"
    days = [float(lines[-1].split("|")[3].split()[0].replace(",", "")) for lines in (one, two)]
    assert days[0] == pytest.approx(2 * days[1], rel=0.02)
    with pytest.raises(ConfigError, match=r"devices is 3, of which each .* use a number that div"):
        dry_run(recipe, 3)


def test_devices_without_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny.recipe_file(tmp_path)
    assert main(["train", str(path), "--devices=2"]) == 2
    assert "--devices is 2, which --dry-run alone uses" in capsys.readouterr().err


def test_what_training_would_refuse_is_refused(tmp_path: Path) -> None:
    short = tiny.recipe(tmp_path, model={"positions": 8})
    with pytest.raises(
        DataError, match=r"has \d+ tokens, but the model reads 8 at most; raise model.positions"
    ):
        dry_run(short)
    paused = tiny.recipe(tmp_path, model={"positions": 14, "pauses": 1})
    with pytest.raises(DataError, match="the model reads 7 at most"):
        dry_run(paused)
    with pytest.raises(ConfigError, match="max_tokens is 65, but the model reads 64"):
        dry_run(tiny.recipe(tmp_path, training={"max_tokens": 65}))


def test_what_the_times_leave_out_is_said(tmp_path: Path) -> None:
    said = "An exact rollout runs the block token after token"
    for solver, expected in (
        ({"kind": "sequential"}, True),
        ({"kind": "auto"}, True),
        ({"kind": "scan"}, False),
    ):
        assert (
            said in dry_run(tiny.recipe(tmp_path, recurrence=tiny.T2MLR, solver=solver))
        ) == expected
    assert said not in dry_run(tiny.recipe(tmp_path))


def test_a_saved_loop_costs_what_a_new_one_does(tmp_path: Path) -> None:
    schedule = {"schedule": {"kind": "fixed", "depth": 3}}
    new = tiny.recipe(
        tmp_path, depth={"looped": {"prelude": [0], "core": [1], "coda": []}} | schedule
    )
    model, tokenizer = build(new, seed=0)
    model.save_pretrained(tmp_path / "loop")
    tokenizer.save_pretrained(tmp_path / "loop")
    saved = tiny.recipe(tmp_path, model={"path": str(tmp_path / "loop")}, depth=schedule)
    assert estimate(saved, outline(saved), tokenizer) == estimate(new, outline(new), tokenizer)


def test_a_loop_s_iterations_need_memory(tmp_path: Path) -> None:
    found = []
    for depth in (1, 4):
        looped = {
            "looped": {"prelude": [], "core": [0, 1], "coda": []},
            "schedule": {"kind": "fixed", "depth": depth},
        }
        recipe = tiny.recipe(tmp_path, depth=looped)
        found.append(estimate(recipe, outline(recipe), tokenizer_for(recipe)).activations)
    assert 2 < found[1] / found[0] < 4


def test_operations_of_a_plain_model(local: list[str]) -> None:
    recipe = load_recipe(RECIPES / "t2mlr-135m-baseline.yaml", local)
    tokenizer = tokenizer_for(recipe)
    found = estimate(recipe, outline(recipe), tokenizer)
    norms = 61 * 584
    matrices = 136_383_272 - norms  # tied: the embeddings count as the head
    assert found.forward == pytest.approx(2 * matrices + 30 * 4 * 576 * 1024)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recurrence": tiny.T2MLR},
        {"model": {"architecture": "lstm"}},
        {"model": {"architecture": "gpt2"}},
        {"model": {"pauses": 2}},
        {"depth": {"shape": [1, 1, 1]}},
        {"depth": {"looped": {"prelude": [], "core": [0, 1], "coda": []}}},
    ],
    ids=["plain", "t2mlr", "lstm", "gpt2", "pauses", "native depth", "looped"],
)
def test_it_counts_what_is_built(changes: dict, tmp_path: Path) -> None:
    recipe = tiny.recipe(tmp_path / "out", **changes)
    model, tokenizer = build(recipe, seed=0)
    found = estimate(recipe, outline(recipe), tokenizer)
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert recipe.name in dry_run(recipe) and "without end" in dry_run(recipe)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "depth",
    [{"shape": [1, 1, 1]}, {"looped": {"prelude": [0], "core": [1], "coda": []}}],
    ids=["native", "looped"],
)
def test_the_core_costs_as_often_as_it_runs(depth: dict, tmp_path: Path) -> None:
    costs = []
    for mean in (1, 2, 5):
        recipe = tiny.recipe(tmp_path, depth=depth | {"schedule": {"kind": "fixed", "depth": mean}})
        costs.append(estimate(recipe, outline(recipe), tokenizer_for(recipe)).forward)
    core = costs[1] - costs[0]
    assert 0 < core < costs[0]
    assert costs[2] - costs[1] == pytest.approx(3 * core)


def test_adapters_beside_a_recurrence(tmp_path: Path) -> None:
    """The copy of the recurrence that PEFT keeps is no parameter of the model, and its block costs
    what it does without."""
    plain = tiny.recipe(tmp_path / "out")
    model, tokenizer = build(plain, seed=0)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    changes = {
        "model": {"path": str(tmp_path / "model")},
        "recurrence": tiny.TURBOCONN,
        "lora": {"rank": 2},
    }
    recipe = from_mapping(Recipe, tiny.settings(tmp_path / "out") | changes)
    found = estimate(recipe, outline(recipe), tokenizer)
    assert found.parameters == count_parameters(build(recipe, seed=0)[0])["parameters"]
    assert found.trained < found.parameters
    whole = tiny.recipe(tmp_path / "out", recurrence=tiny.TURBOCONN)
    adapters = 2 * count_parameters(build(recipe, seed=0)[0])["adapters"]
    assert found.forward == pytest.approx(
        estimate(whole, outline(whole), tokenizer).forward + adapters
    )
    assert "found by" in dry_run(recipe)


def test_passes_are_those_that_a_solver_makes() -> None:
    assert Jacobi(16, 4).passes() == (17, 5)
    assert Scan(2, 1).passes() == (3, 2)
    assert Sequential().passes() == (1, 1)


def test_the_command(tmp_path: Path, local: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = str(RECIPES / "t2mlr-135m-13-18.yaml")
    assert main(["train", path, "--dry-run", *local, f"--output={tmp_path / 'out'}"]) == 0
    text = capsys.readouterr().out
    assert "136,175,042" in text and "H100" in text and "GiB" in text
    assert not (tmp_path / "out").exists()
    for override, named in (
        ("--task.files=[/no/such.txt]", "/no/such.txt cannot be read"),
        ("--model.tokenizer=/no/such", "no tokenizer could be loaded from /no/such"),
        ("--model.vocabulary=3", "model.vocabulary is 3, but the tokenizer has"),
        ("--model.architecture=gpt2", "has no such setting"),
    ):
        assert main(["train", path, "--dry-run", *local, override]) == 2
        assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    "path", sorted((RECIPES / "cpu").glob("*.yaml")), ids=lambda path: path.stem
)
def test_cpu_recipes_can_be_read(path: Path) -> None:
    if path.stem.startswith("study-"):
        study = from_mapping(Study, load_yaml(path))
        recipes = [study.variant(labels) for labels in study.combinations()]
        assert len(recipes) == len({recipe.name for recipe in recipes})
    else:
        load_recipe(path, [])
    assert torch.is_grad_enabled()
