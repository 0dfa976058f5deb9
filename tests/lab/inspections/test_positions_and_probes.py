"""Gates over training, loss and state by position, and probes: against hand computations and a
planted signal."""

import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import zoo
from helpers import hosted, tokens, unhosted
from small_looped import looped

from undertow.cli.main import main
from undertow.errors import ConfigError
from undertow.lab.inspections.positions import loss_by_position, state_norms
from undertow.lab.inspections.probes import layer_outputs, probe_losses, recording
from undertow.lab.runs.log import read_log
from undertow.lab.training import train
from undertow.models import with_pauses


def batch(rows: int = 3, length: int = 8, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random tokens whose last row is padded by three on the right; the first label of each row is
    masked too."""
    ids = tokens(rows, length, seed)
    mask, labels = torch.ones_like(ids), ids.clone()
    ids[-1, -3:], mask[-1, -3:], labels[-1, -3:], labels[:, 1] = 0, 0, -100, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("name", ["hosted", "plain"])
def test_loss_by_position_adds_up_to_the_loss(name: str) -> None:
    model: Any = hosted("llama", "t2mlr-middle") if name == "hosted" else unhosted("llama")
    batches = [batch(), batch(seed=2)]
    found = loss_by_position(model, batches)
    assert set(found) == set(range(1, 7)), "what is predicted from position 0 has no label"
    counts = {position: 2 * (2 if position >= 4 else 3) for position in found}
    mean = sum(found[p] * counts[p] for p in found) / sum(counts.values())
    with torch.no_grad():
        losses = [float(model(**each, use_cache=False).loss) for each in batches]
    assert mean == pytest.approx(sum(losses) / 2, abs=1e-4)
    assert len({round(value, 3) for value in found.values()}) > 2


def test_state_norms_are_those_of_the_rms_norm() -> None:
    found = state_norms(hosted("llama", "t2mlr-middle"), [batch()])
    assert set(found) == set(range(1, 8)), "the first position receives no state"
    assert all(value == pytest.approx(1, abs=1e-3) for value in found.values()), (
        "T²MLR normalises its states"
    )
    other = state_norms(hosted("llama", "turboconn-1"), [batch()])
    assert any(abs(value - 1) > 1e-2 for value in other.values())
    with pytest.raises(ConfigError, match="no recurrence"):
        state_norms(unhosted("llama"), [batch()])


def test_layer_outputs_are_hidden_states() -> None:
    model, each = unhosted("llama"), batch()
    found, labels = layer_outputs(model, [each])
    with torch.no_grad():
        hidden = model.eval()(**each, use_cache=False, output_hidden_states=True).hidden_states
    wanted = each["labels"][:, 1:] != -100
    assert torch.equal(labels, each["labels"][:, 1:][wanted])
    for layer in range(3):  # the library norms the last one
        assert torch.allclose(found[layer], hidden[layer + 1][:, :-1][wanted], atol=1e-5)
    recurrent, _ = layer_outputs(hosted("llama", "t2mlr-middle"), [each])
    assert torch.allclose(recurrent[0], found[0], atol=1e-5), (
        "below the recurrent block nothing changes"
    )
    assert not torch.allclose(recurrent[1], found[1], atol=1e-2)


def test_layer_outputs_of_loops_and_pauses() -> None:
    """A loop's are those of its last iteration, and with pauses those of the last position of each
    token."""
    each = batch()
    wanted = each["labels"][:, 1:] != -100
    loop = looped("llama", "plain")
    found, _ = layer_outputs(loop, [each])
    with recording(list(loop.model.layers)) as calls, torch.no_grad():
        loop(**each, use_cache=False)
    assert [len(own) for own in calls] == [1, 4, 4, 1]
    assert torch.equal(found[2], calls[2][-1][:, :-1][wanted])
    paused = with_pauses(unhosted("llama"), 2).eval()
    found, _ = layer_outputs(paused, [each])
    with recording(list(paused.base.model.layers)) as calls, torch.no_grad():
        paused(**each, use_cache=False)
    assert torch.equal(found[1], calls[1][0][:, 2::3][:, :-1][wanted])
    with pytest.raises(ConfigError, match="does not run once for each token"):
        layer_outputs(looped("llama", "dropping"), [each])


def test_a_probe_finds_what_a_layer_knows_and_nothing_else() -> None:
    """The label is the token itself, which the first layer's output surely tells; or noise, which
    nothing does."""
    model = unhosted("llama")
    known, noise = [], []
    for seed in range(12):
        ids = tokens(8, 12, seed) % 4 + 2
        labels = torch.cat([torch.full((8, 1), -100), ids[:, :-1]], dim=1)
        random = torch.randint(2, 6, ids.shape, generator=torch.Generator().manual_seed(100 + seed))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        known.append(inputs | {"labels": labels})
        noise.append(inputs | {"labels": random})
    sure = probe_losses(model, known[:9], known[9:], hidden=64, steps=250)
    unsure = probe_losses(model, noise[:9], noise[9:], hidden=64, steps=250)
    assert len(sure) == len(unsure) == 4 and zoo.VOCAB > 4
    assert sure[0] < 0.5 and min(unsure) > 0.9 * math.log(4)


def test_gates_are_logged_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny.recipe(tmp_path, recurrence=tiny.T2MLR, solver={"kind": "sequential"})
    folder = train(recipe, seed=0)
    entries = [entry for entry in read_log(folder / "log.jsonl") if "loss" in entry]
    assert len(entries) == 6 and entries[0]["gate_recurrent"] == entries[0]["gate_current"] == 0
    assert entries[-1]["gate_recurrent"] != 0 and entries[-1]["gate_current"] != 0
    saved = {
        name: value for name, value in tiny.weights(folder / "model").items() if "gamma" in name
    }
    for name, value in saved.items():
        gate = "gate_recurrent" if name.endswith("recurrent") else "gate_current"
        assert entries[-1][gate] == pytest.approx(math.tanh(float(value)), abs=1e-6)
    run = tmp_path / "tiny"
    assert main(["inspect", "gates", str(run)]) == 0
    assert (
        "seed-0, gate_recurrent" in capsys.readouterr().out
        and (run / "gates.png").stat().st_size > 1000
    )
    assert main(["inspect", "positions", str(run), "--examples=8"]) == 0
    assert "| position |" in capsys.readouterr().out and (run / "state-by-position.png").is_file()
    plain = tiny.recipe(tmp_path, name="plain")
    train(plain, seed=0)
    assert main(["inspect", "gates", str(tmp_path / "plain")]) == 2
    assert "has no gates" in capsys.readouterr().err
    assert (
        main(["inspect", "probes", str(run), f"--baseline={tmp_path / 'plain'}", "--examples=8"])
        == 0
    )
    by_run = capsys.readouterr().out
    assert "plain: loss" in by_run and (run / "probes.png").stat().st_size > 1000
    train(tiny.recipe(tmp_path, name="longer", task=tiny.TINY["task"] | {"max_length": 9}), seed=0)
    assert (
        main(["inspect", "probes", str(run), f"--baseline={tmp_path / 'longer'}", "--examples=8"])
        == 2
    )
    assert "learned another task than" in capsys.readouterr().err
    seed, other = run / "seed-0", tmp_path / "plain" / "seed-0"
    assert main(["inspect", "probes", str(seed), f"--baseline={other}", "--examples=8"]) == 0
    by_seed = capsys.readouterr().out
    assert f"{seed}: loss" in by_seed and f"{other}: loss" in by_seed
    losses = [
        [line.split("|")[2:] for line in text.splitlines()[2:] if "|" in line]
        for text in (by_run, by_seed)
    ]
    assert [[cell.strip() for cell in row] for row in losses[0]] == [
        [cell.strip() for cell in row] for row in losses[1]
    ]
