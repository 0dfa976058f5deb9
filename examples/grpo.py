"""Reinforcement learning from a function with TRL's GRPOTrainer, best of a model that can do a
little: `python examples/grpo.py [--model out/sft] [--lora] [--steps 30]`"""

import argparse

from peft import LoraConfig
from sums import base_model, settings, sums, tokenizer
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

import undertow

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="what examples/sft.py has left; if left out, a new model")
parser.add_argument("--lora", action="store_true")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--output", default="out/grpo")
options = parser.parse_args()

if options.model:
    model = AutoModelForCausalLM.from_pretrained(options.model)  # with its recurrence
else:
    model = undertow.attach(base_model(), undertow.T2MLR(1, 2))
# A generated token is always exact. So training has to be: another solver's error would look like a
# change of the policy.
undertow.set_solver(model, undertow.Sequential())


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
        **settings(options.steps, rate=5e-4, batch=64),  # 8 prompts
    ),
    train_dataset=sums(),
    processing_class=tokenizer,
    peft_config=lora if options.lora else None,
)
trainer.train()
trainer.save_model()
