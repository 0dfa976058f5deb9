"""Preferences with TRL's DPOTrainer: `python examples/dpo.py [--lora] [--steps 30]`"""

import argparse
import copy

from peft import LoraConfig
from sums import base_model, settings, sums, tokenizer
from trl import DPOConfig, DPOTrainer

import undertow

parser = argparse.ArgumentParser()
parser.add_argument("--lora", action="store_true")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--output", default="out/dpo")
options = parser.parse_args()

model = base_model()
undertow.attach(model, undertow.T2MLR(1, 2))

data = sums().rename_columns({"right": "chosen", "wrong": "rejected"})
lora = LoraConfig(
    r=8,
    target_modules="all-linear",
    exclude_modules=r".*recurrence.*",
    modules_to_save=["recurrence"],
)
trainer = DPOTrainer(
    model,
    # Left out, TRL would load the base model without the recurrence, which is refused. With LoRA
    # the reference is the model with its adapter off; what was loaded from a folder needs none.
    ref_model=None if options.lora else copy.deepcopy(model),
    args=DPOConfig(output_dir=options.output, **settings(options.steps)),
    train_dataset=data,
    processing_class=tokenizer,
    peft_config=lora if options.lora else None,
)
trainer.train()
trainer.save_model()
