"""A reward model with TRL's RewardTrainer: `python examples/reward.py [--lora] [--steps 30]`"""

import argparse
import tempfile

from peft import LoraConfig
from sums import base_model, settings, sums, tokenizer
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer

import undertow

parser = argparse.ArgumentParser()
parser.add_argument("--lora", action="store_true")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--output", default="out/reward")
options = parser.parse_args()

with tempfile.TemporaryDirectory() as folder:  # of a plain model, or of one with a recurrence
    base_model().save_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
undertow.attach(model, undertow.T2MLR(1, 2))

data = sums().rename_columns({"right": "chosen", "wrong": "rejected"})
lora = LoraConfig(
    task_type="SEQ_CLS",
    r=8,
    target_modules="all-linear",
    exclude_modules=r".*(recurrence|score).*",
    modules_to_save=["recurrence", "score"],
)
trainer = RewardTrainer(
    model,
    args=RewardConfig(output_dir=options.output, **settings(options.steps)),
    train_dataset=data,
    processing_class=tokenizer,
    peft_config=lora if options.lora else None,
)
trainer.train()
trainer.save_model()  # AutoModelForSequenceClassification loads it after import undertow
