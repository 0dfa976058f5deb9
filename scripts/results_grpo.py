"""All of docs/results/grpo.md: a small T²MLR model and the same Transformer learn Parity of short
strings from answers, then of long ones from rewards alone, with TRL's SFTTrainer and GRPOTrainer.

    .venv/bin/python scripts/results_grpo.py

Some half an hour on one CPU core. What each model and seed came to is kept in runs/grpo, and not
trained again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import undertow
from undertow.files import write_text
from undertow.lab.evaluation.accuracy import accuracy_by_length
from undertow.lab.evaluation.figures import lines_figure
from undertow.lab.runs.versions import versions
from undertow.lab.tables import table
from undertow.lab.tasks import Parity, character_tokenizer
from undertow.lab.training import FastGates

SHORT = Parity(template="bare", max_length=16)  # what answers are given to
LONG = Parity(template="bare", min_length=17, max_length=48)
HARD = Parity(template="bare", min_length=9, max_length=16)
LENGTHS, EXAMPLES = (16, 32, 48, 64), 512  # of the tests
# What is rewarded, by the model: the last is where the Transformer begins between chance and right.
CASES = {
    "T²MLR": ("t2mlr", LONG),
    "Transformer": ("transformer", LONG),
    "Transformer, 9 to 16": ("transformer", HARD),
}
# The supervised part ends where the reward on held-out short strings is this, or after so many
# steps.
ENOUGH, SUPERVISED_STEPS, CHECK_EVERY = 0.95, 1500, 25
GRPO_STEPS, PROMPTS, COMPLETIONS = 150, 16, 8
# The rate is the best of these with a seed of its own.
RATES, RATE_SEED, SEEDS = (1e-4, 2e-4, 5e-4), 10, (0, 1, 2)
TOKENIZER = character_tokenizer(SHORT.characters())
ROOT = Path(__file__).parents[1]


class GatedSFTTrainer(FastGates, SFTTrainer):
    """γ learns thirty times as fast, as in the Parity recipes; a Transformer has none."""

    gate_multiplier = 30.0


def new_model(kind: str) -> Any:
    """Two layers of width 64 as `undertow train` makes them, with a recurrence over both or
    without. States are exact throughout, in generation and in training."""
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=64,
        intermediate_size=168,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=64**-0.5,
        pad_token_id=TOKENIZER.pad_token_id,
        eos_token_id=TOKENIZER.eos_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    if kind == "t2mlr":
        undertow.attach(model, undertow.T2MLR(0, 1), undertow.Sequential())
    return model


def reward(
    model: Any, lengths: tuple[int, ...], examples: int, split: Any = "test", temperature: float = 1
) -> dict[int, float]:
    """The share of right answers to held-out strings by length, sampled as in training."""
    found = accuracy_by_length(
        model, TOKENIZER, SHORT, lengths, examples, temperature=temperature, split=split
    )
    return {length: one.share for length, one in zip(lengths, found, strict=True)}


class UntilEnough(TrainerCallback):
    """Ends the supervised part."""

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        if state.global_step % CHECK_EVERY == 0:
            found = reward(model, (8, 12, 16), 128, "valid")
            control.should_training_stop |= sum(found.values()) / len(found) >= ENOUGH


def settings(seed: int, steps: int, batch: int, rate: float, folder: Path) -> dict[str, Any]:
    """What both trainers are given."""
    return {
        "output_dir": str(folder / "trainer"),
        "max_steps": steps,
        "per_device_train_batch_size": batch,
        "learning_rate": rate,
        "seed": seed,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "disable_tqdm": True,
    }


def learn_from_answers(model: Any, seed: int, folder: Path) -> int:
    """The steps that it took."""
    task = SHORT.seeded(seed)
    examples = (task.example("train", index) for index in range(64 * SUPERVISED_STEPS))
    trainer = GatedSFTTrainer(
        model,
        args=SFTConfig(
            **settings(seed, SUPERVISED_STEPS, 64, 2e-3, folder),
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=100,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": one.prompt, "completion": one.completion} for one in examples]
        ),
        processing_class=TOKENIZER,
        callbacks=[UntilEnough()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return int(trainer.state.global_step)


def is_right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The reward: 1 for the right answer and nothing else, 0 for all others."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def learn_from_rewards(
    model: Any, rewarded: Parity, seed: int, rate: float, folder: Path
) -> list[tuple[int, float]]:
    """The mean reward of each ten steps."""
    task = rewarded.seeded(seed)
    examples = (task.example("train", index) for index in range(PROMPTS * GRPO_STEPS))
    trainer = GRPOTrainer(
        model,
        reward_funcs=is_right,
        args=GRPOConfig(
            **settings(seed, GRPO_STEPS, PROMPTS * COMPLETIONS, rate, folder),
            num_generations=COMPLETIONS,
            max_completion_length=2,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": one.prompt, "answer": one.completion} for one in examples]
        ),
        processing_class=TOKENIZER,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    log = trainer.state.log_history
    return [(entry["step"], entry["reward"]) for entry in log if "reward" in entry]


def worth(model: Any) -> dict[str, Any]:
    """What a model's answers are worth, sampled as in training and greedy."""
    return {
        "sampled": reward(model, LENGTHS, EXAMPLES),
        "greedy": reward(model, LENGTHS, EXAMPLES, temperature=0),
    }


def kept(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What is found, from `path` if it has been."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        packages = {name: metadata.version(name) for name in ("trl", "datasets")}
        found = make() | {"versions": versions() | packages}
        write_text(path, json.dumps(found, indent=1) + "\n")
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return read


def after_answers(kind: str, seed: int, folder: Path) -> dict[str, Any]:
    """The supervised part; leaves its model in `folder`."""
    torch.manual_seed(seed)
    model, start = new_model(kind), time.perf_counter()
    steps = learn_from_answers(model, seed, folder)
    seconds = time.perf_counter() - start
    model.save_pretrained(folder / "model")
    size = sum(parameter.numel() for parameter in model.parameters())
    return {"steps": steps, "seconds": seconds, "parameters": size} | worth(model)


def after_rewards(rewarded: Parity, seed: int, rate: float, folder: Path) -> dict[str, Any]:
    """Reinforcement learning of the model in `folder`."""
    model, start = AutoModelForCausalLM.from_pretrained(folder / "model"), time.perf_counter()
    curve = learn_from_rewards(model, rewarded, seed, rate, folder)
    return {"rewards": curve, "seconds": time.perf_counter() - start} | worth(model)


def both_parts(case: str, seed: int, rate: float, runs: Path) -> dict[str, Any]:
    """What a model is worth before and after its rewards."""
    kind, rewarded = CASES[case]
    folder = runs / f"{kind}-{seed}"
    before = kept(folder / "answers.json", partial(after_answers, kind, seed, folder))
    path = folder / f"rewards-{rewarded.min_length}-{rewarded.max_length}-{rate:g}.json"
    after = kept(path, partial(after_rewards, rewarded, seed, rate, folder))
    print(
        f"{case}, seed {seed}, rate {rate:g}: {before['sampled']} to {after['sampled']}", flush=True
    )
    return {"case": case, "seed": seed, "rate": rate, "before": before, "after": after}


def rewarded_lengths(case: str) -> list[int]:
    task = CASES[case][1]
    return [n for n in LENGTHS if task.min_length <= n <= task.max_length]


def rewarded_mean(case: str, found: dict[str, Any]) -> float:
    """The mean reward on held-out strings of the lengths that are rewarded."""
    shares = [found["sampled"][str(n)] for n in rewarded_lengths(case)]
    return sum(shares) / len(shares)


def rose(case: str, before: float, after: float) -> bool:
    """Whether a reward rose by more than two standard errors of the difference, as if the strings
    were others."""
    count = EXAMPLES * len(rewarded_lengths(case))
    return after - before > 2 * (sum(p * (1 - p) for p in (before, after)) / count) ** 0.5


# --- the page


def percent(*shares: float) -> str:
    """A share, or the mean of several and the smallest and the largest."""
    mean = sum(shares) / len(shares)
    spread = f" ({100 * min(shares):.1f} to {100 * max(shares):.1f})" if len(shares) > 1 else ""
    return f"{100 * mean:.1f}{spread}"


def by_length(results: list[dict[str, Any]], how: str) -> str:
    """A table of the mean over the seeds, before and after."""
    rows = []
    for case in CASES:
        mine = [each for each in results if each["case"] == case]
        for part in ("before", "after"):
            shares = [percent(*(one[part][how][str(n)] for one in mine)) for n in LENGTHS]
            rows.append([case, part, *shares])
    return table(["model", "rewards", *(f"{n} digits (%)" for n in LENGTHS)], rows)


def statement(case: str, results: list[dict[str, Any]]) -> str:
    """What became of the reward, of each seed on its own."""
    mine = [each for each in results if each["case"] == case]
    pairs = [
        (rewarded_mean(case, one["before"]), rewarded_mean(case, one["after"])) for one in mine
    ]
    number = sum(rose(case, *pair) for pair in pairs)
    moves = ", ".join(f"{percent(before)} to {percent(after)}" for before, after in pairs)
    task = CASES[case][1]
    return (
        f"- {case.partition(',')[0]}, {task.min_length} to {task.max_length} digits at a rate of "
        f"{mine[0]['rate']:g}: up with {number} of {len(pairs)} seeds; {moves}."
    )


def write_page(tried: list[dict[str, Any]], results: list[dict[str, Any]]) -> None:
    """docs/results/grpo.md, its figure and the figures behind it."""
    page = ROOT / "docs" / "results"
    (page / "grpo").mkdir(exist_ok=True)
    for one in [*tried, *results]:
        for part in ("before", "after"):
            one[part]["versions"].pop("command", None)
    write_text(page / "grpo" / "grpo.json", json.dumps({"rates": tried, "results": results}) + "\n")
    curves = {}
    for case in CASES:
        mine = [one["after"]["rewards"] for one in results if one["case"] == case]
        curves[case] = [
            (points[0][0], 100 * sum(share for _, share in points) / len(points))
            for points in zip(*mine, strict=True)
        ]
    lines_figure(curves, page / "grpo" / "rewards.png", "GRPO on Parity", "step", "mean reward (%)")
    rates = [
        [one["case"], f"{one['rate']:g}"]
        + [percent(rewarded_mean(one["case"], one[part])) for part in ("before", "after")]
        for one in tried
    ]
    first = results[0]["before"]
    versions_ = ", ".join(f"{name} {first['versions'][name]}" for name in PACKAGES)
    sizes = {one["case"]: one["before"]["parameters"] for one in results}
    minutes = {part: [one[part]["seconds"] / 60 for one in results] for part in ("before", "after")}
    steps = {
        case: ", ".join(str(one["before"]["steps"]) for one in results if one["case"] == case)
        for case in ("T²MLR", "Transformer")
    }
    write_text(
        page / "grpo.md",
        PAGE.format(
            versions=versions_,
            small=sizes["Transformer"],
            large=sizes["T²MLR"],
            enough=100 * ENOUGH,
            most=SUPERVISED_STEPS,
            t2mlr_steps=steps["T²MLR"],
            transformer_steps=steps["Transformer"],
            grpo_steps=GRPO_STEPS,
            prompts=PROMPTS,
            completions=COMPLETIONS,
            statements="\n".join(statement(case, results) for case in CASES),
            sampled=by_length(results, "sampled"),
            greedy=by_length(results, "greedy"),
            rates=table(["model", "rate", "before (%)", "after (%)"], rates),
            rate_seed=RATE_SEED,
            minutes=" and ".join(f"{min(m):.1f} to {max(m):.1f}" for m in minutes.values()),
        ),
    )


PACKAGES = ("python", "torch", "transformers", "trl", "datasets")
PAGE = """# GRPO on long strings

Parity from the final answer alone: first supervised on short strings, then on longer ones with
nothing but whether an answer was right. Written by

    .venv/bin/python scripts/results_grpo.py

Two layers of width 64 ({small:,} parameters), and the same with T²MLR over both ({large:,}), from
scratch. One thread; {versions}. Three seeds, of weights, data and sampling.

1. **Answers.** TRL's `SFTTrainer` on strings of 1 to 16 digits, 64 a step, until {enough:.0f} % of
   sampled answers to held-out strings of 8, 12 and 16 digits are right, or for {most:,} steps.
   T²MLR took {t2mlr_steps} steps; the Transformer {transformer_steps}.
2. **Rewards.** TRL's `GRPOTrainer` on strings of 17 to 48 digits: {grpo_steps} steps of {prompts}
   prompts with {completions} sampled answers each, 1 for the right answer and 0 for any other, no
   reference. T²MLR generates and trains on exact states, `Sequential()`. For a Transformer that is
   at chance on such strings there is little to reward, so it was also rewarded on 9 to 16 digits.

Mean reward on held-out strings of the rewarded lengths (32 and 48 digits, or 16; 512 each, sampled
at temperature 1), before and after, seed by seed (%). Up is what rose by more than two standard
errors:

{statements}

![Mean reward of a step](grpo/rewards.png)

By length, sampled. No held-out string is trained on; in neither part is any longer than 48 digits:

{sampled}

The same models' likeliest answers:

{greedy}

## The learning rate

With a seed of its own, {rate_seed}; each row of the list above has the rate that came out best:

{rates}

The two parts took {minutes} minutes, on a machine that others used too.
[The JSON](grpo/grpo.json) holds every number and each run's versions.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "grpo")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tried, results = [], []
    for case in CASES:
        mine = [both_parts(case, RATE_SEED, rate, options.runs) for rate in RATES]
        best = max(mine, key=lambda one: rewarded_mean(case, one["after"]))["rate"]
        results += [both_parts(case, seed, best, options.runs) for seed in SEEDS]
        tried += mine
    write_page(tried, results)


if __name__ == "__main__":
    main()
