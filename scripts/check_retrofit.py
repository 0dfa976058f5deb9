"""Check a retrofitted run on real problems: it reloads with equal logits, and answers a left-padded
batch as one by one.

python scripts/check_retrofit.py runs/smollm2-135m-t2mlr-gsm8k/seed-0
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import undertow
from undertow.lab.evaluation.accuracy import generate
from undertow.lab.runs.loading import quiet_libraries
from undertow.lab.runs.run import Run
from undertow.lab.tasks import encode_prompt

PROBLEMS, NEW_TOKENS = 16, 12


def main() -> None:
    quiet_libraries()
    run = Path(sys.argv[1])
    recipe = Run(run).recipe()
    model, tokenizer = Run(run).load()
    pathway = model.model.recurrence.pathway
    recurrent, current = (
        torch.tanh(pathway.gamma_recurrent).item(),
        torch.tanh(pathway.gamma_current).item(),
    )
    print(f"gates: tanh γ_rec {recurrent:+.4f}, tanh γ_cur {current:+.4f}")

    examples = [recipe.task.example("test", index) for index in range(PROBLEMS)]
    ids = torch.tensor([encode_prompt(examples[0].prompt, tokenizer)])
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        logits = model(ids).logits
        model.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        print(
            "saved and loaded again: largest difference of logits "
            f"{float((again(ids).logits - logits).abs().max())}"
        )
        undertow.detach(again)
        print(
            "without the recurrence: largest difference "
            f"{float((again(ids).logits - logits).abs().max()):.4f}"
        )

    together = generate(model, tokenizer, examples, PROBLEMS, 0.0, NEW_TOKENS)
    alone = [generate(model, tokenizer, [example], 1, 0.0, NEW_TOKENS)[0] for example in examples]
    lengths = sorted(len(encode_prompt(example.prompt, tokenizer)) for example in examples)
    same = sum(a == b for a, b in zip(together, alone, strict=True))
    print(
        f"{same} of {PROBLEMS} answers of a left-padded batch ({lengths[0]} to {lengths[-1]} "
        "tokens) equal those alone"
    )


if __name__ == "__main__":
    main()
