"""Supervised fine-tuning with TRL's SFTTrainer: `python examples/sft.py [--lora] [--steps 30]`"""

import argparse

from peft import LoraConfig
from sums import base_model, settings, sums, tokenizer
from trl import SFTConfig, SFTTrainer

import undertow
from undertow.lab.training import FastGates


class GatedSFTTrainer(FastGates, SFTTrainer):
    gate_multiplier = 100.0  # T²MLR's gates start closed, and learn faster than the rest


parser = argparse.ArgumentParser()
parser.add_argument("--lora", action="store_true")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--output", default="out/sft")
options = parser.parse_args()

model = base_model()
undertow.attach(model, undertow.T2MLR(1, 2))

# The loss is the completion's alone.
data = sums().rename_column("right", "completion").remove_columns("wrong")
lora = LoraConfig(
    r=8,
    target_modules="all-linear",
    exclude_modules=r".*recurrence.*",  # which is trained whole,
    modules_to_save=["recurrence"],  # and saved with the adapter
)
trainer = GatedSFTTrainer(
    model,
    args=SFTConfig(output_dir=options.output, **settings(options.steps)),
    train_dataset=data,
    processing_class=tokenizer,
    peft_config=lora if options.lora else None,
)
trainer.train()
trainer.save_model()  # AutoModelForCausalLM loads it after import undertow; or an adapter
