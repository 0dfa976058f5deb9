"""Every recurrence shards with FSDP2: a training step on one process gives the loss and gradients
of a step without."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers import (
    PATHWAYS,
    SAME,
    difference,
    logits,
    randomize,
    recurrent_parameters,
    tokens,
    unhosted,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import undertow
from undertow import Looped
from undertow.lab.training.gates import GateLog

RECURRENCES = {name: PATHWAYS[name] for name in ("t2mlr-middle", "turboconn-3")} | {
    "looped": Looped((0,), (1, 2), (3,))
}


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(model: PreTrainedModel) -> PreTrainedModel:
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers._modules.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@pytest.mark.parametrize("name", RECURRENCES)
def test_a_training_step(name: str, group: None) -> None:
    model, ids = (
        randomize(undertow.attach(unhosted("llama"), RECURRENCES[name], undertow.Scan(2, 1))),
        tokens(2, 9),
    )
    steps = []
    for sharded in (False, True):
        model.zero_grad()
        loss = (shard(model) if sharded else model)(ids, labels=ids, use_cache=False).loss
        loss.backward()
        steps.append(
            (loss.detach(), {key: p.grad for key, p in recurrent_parameters(model).items()})
        )
    (loss, want), (sharded_loss, got) = steps
    assert float(sharded_loss) == pytest.approx(float(loss), rel=1e-5)
    for key, gradient in got.items():
        assert isinstance(gradient, DTensor), key
        if gradient.numel() > 1:
            assert difference(gradient.full_tensor(), want[key]) < SAME, key
        else:
            assert float(gradient.full_tensor()) == pytest.approx(float(want[key]), rel=1e-4), key


def test_what_a_sharded_model_saves_loads(group: None, tmp_path: Path) -> None:
    """Sharding changes the model's class, which the folder must not name."""
    model, ids = (
        randomize(undertow.attach(unhosted("llama"), PATHWAYS["t2mlr-middle"])),
        tokens(2, 9),
    )
    want = logits(model, ids)
    shard(model).save_pretrained(
        tmp_path,
        state_dict=get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)),
    )
    assert difference(logits(AutoModelForCausalLM.from_pretrained(tmp_path), ids), want) < SAME


def test_the_log_has_the_gates_of_a_sharded_model(group: None) -> None:
    model = shard(randomize(undertow.attach(unhosted("llama"), PATHWAYS["t2mlr-middle"])))
    logs = {"loss": 1.0}

    class State:
        log_history = [{}]  # noqa: RUF012

    GateLog().on_log(None, State(), None, logs=logs, model=model)
    assert logs["gate_recurrent"] == pytest.approx(0.4621, abs=1e-4)


def test_control_fsdp_refuses_scalars(group: None) -> None:
    model = undertow.attach(unhosted("llama"), PATHWAYS["t2mlr-middle"])
    model.model.recurrence.pathway.reshape(older=True)
    with pytest.raises(ValueError, match="scalar"):
        shard(model)
