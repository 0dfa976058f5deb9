"""Write folders as this version saves them, with what they give: what later versions must still
load.

cd tests/old/v0.1 && PYTHONPATH=../../../src python write.py
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import undertow
from undertow.cli.main import main

IDS = torch.tensor([[1, 5, 3, 7, 2, 9, 4, 8], [4, 4, 6, 1, 8, 3, 2, 5]])


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=11,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()


def opened(model):
    """The model with its recurrence's weights away from where they start."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "recurrence" in name or "lora" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def outputs(model):
    """The loss in training and the ids generated, which go through the saved settings."""
    model.zero_grad()
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    size = sum(float(p.grad.double().norm() ** 2) for p in model.parameters() if p.grad is not None)
    generated = model.generate(
        IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=6, do_sample=False
    )
    return {"loss": loss.item(), "gradient": size**0.5, "generated": generated.tolist()}


HOSTED = {
    "t2mlr": lambda: [(undertow.T2MLR(1, 2), undertow.Jacobi(4, 2))],
    "turboconn": lambda: [
        (
            undertow.TurboConn(((1, 0), (2, 1)), lag=2, alpha=0.5, rank=4),
            undertow.Scan(3, gradient="adjoint(2)"),
        )
    ],
    "soft-token": lambda: [(undertow.SoftToken(0.2), undertow.Sequential("truncated(2)"))],
    "auto": lambda: [(undertow.T2MLR(0, 2), undertow.Auto(rollout_cost=3.0))],
    "looped": lambda: [(undertow.Looped((0,), (1,), (2,), depth=3, gate=True), None)],
    "both": lambda: [
        (undertow.Looped((0,), (1,), (2,), depth=2), None),
        (undertow.TurboConn(((2, 0),), lag=1, alpha=0.5, rank=4), undertow.Chunked(4)),
    ],
}


def write() -> None:
    found = {}
    for name, make in HOSTED.items():
        model = llama()
        for recurrence, solver in make():
            undertow.attach(model, recurrence, solver)
        opened(model).save_pretrained(name)
        found[name] = outputs(model)
    torch.manual_seed(2)
    config = undertow.HuginnConfig(
        vocab_size=11,
        n_embd=8,
        n_heads=2,
        intermediate_size=16,
        block_size=64,
        n_layers_in_prelude=1,
        n_layers_in_recurrent_block=1,
        n_layers_in_coda=1,
        mean_recurrence=3,
        mean_backprop_depth=2,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    huginn = undertow.HuginnForCausalLM(config).eval()
    huginn.save_pretrained("huginn")
    found["huginn"] = outputs(huginn)
    base = llama()
    base.save_pretrained("base")
    hosted = undertow.attach(
        type(base).from_pretrained("base"), undertow.T2MLR(1, 2), undertow.Scan(3)
    )
    adapted = get_peft_model(
        hosted,
        LoraConfig(
            r=2, target_modules=["q_proj"], modules_to_save=["recurrence"], task_type="CAUSAL_LM"
        ),
    )
    opened(adapted).save_pretrained("adapter")
    found["adapter"] = outputs(adapted.eval())
    Path("outputs.json").write_text(json.dumps(found, indent=1) + "\n")


def stop_after_four(arguments, state, control, **_):
    if state.global_step == 5:
        raise KeyboardInterrupt


if __name__ == "__main__":
    write()
    for name in ("t2mlr", "depth"):
        assert main(["train", f"recipes/{name}.yaml"]) == 0
    from undertow.training.log import RunLog

    RunLog.on_step_end = lambda self, *given, **more: stop_after_four(*given, **more)
    assert main(["train", "recipes/stopped.yaml"]) == 130
