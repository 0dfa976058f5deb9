"""Reinforcement learning from a function with TRL's GRPOTrainer:
`python examples/grpo.py [--lora] [--steps 30]`"""

import argparse

from peft import LoraConfig
from sums import base_model, settings, sums, tokenizer
from trl import GRPOConfig, GRPOTrainer

import undertow

parser = argparse.ArgumentParser()
parser.add_argument("--lora", action="store_true")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--output", default="out/grpo")
options = parser.parse_args()

model = base_model()
# A generated token is always exact. So training has to be: another solver's error would look like a
# change of the policy.
undertow.attach(model, undertow.T2MLR(1, 2), undertow.Sequential())


def is_right(completions: list[str], right: list[str], **columns: list[str]) -> list[float]:
    """1 for an answer that begins with the right digit; the data's other columns come along."""
    return [float(text[:1] == answer) for text, answer in zip(completions, right, strict=True)]


lora = LoraConfig(
    r=8,
    target_modules="all-linear",
    exclude_modules=r".*recurrence.*",
    modules_to_save=["recurrence"],
)
trainer = GRPOTrainer(
    model,
    reward_funcs=is_right,  # or a reward model: examples/reward.py
    args=GRPOConfig(
        output_dir=options.output,
        num_generations=8,
        max_completion_length=2,
        **settings(options.steps),
    ),
    train_dataset=sums(),
    processing_class=tokenizer,
    peft_config=lora if options.lora else None,
)
trainer.train()
trainer.save_model()
