"""The benchmark compares what it says it does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from undertow import T2MLR, Sequential, SoftToken, TurboConn
from undertow.errors import ConfigError
from undertow.host.attachment import find_pathway
from undertow.lab.benchmark import Bench, bench, candidates
from undertow.lab.benchmark.candidates import (
    MATCHED,
    count,
    matched,
    recurrent,
    training_candidates,
    transformer,
)
from undertow.lab.benchmark.literal import LiteralRollout
from undertow.lab.benchmark.memory import peak_memory
from undertow.lab.benchmark.run import train_step
from undertow.pathways import Recurrence

SHAPE = {
    "layers": 4,
    "width": 32,
    "head_width": 8,
    "vocabulary": 50,
    "tokens": 9,
    "batch": 2,
    "prompt": 12,
    "generated": 3,
}


def settings(recurrence: Recurrence) -> Bench:
    return Bench(recurrence=recurrence, rounds=1, threads=1, **SHAPE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "recurrence",
    [TurboConn(((3, 0), (2, 1), (3, 2)), lag=4, rank=4), T2MLR(1, 2), SoftToken()],
    ids=lambda r: r.kind,
)
def test_the_literal_loop_computes_what_the_rollout_does(recurrence: Recurrence) -> None:
    ours = recurrent(settings(recurrence), Sequential()).double().train()
    literal = LiteralRollout(recurrent(settings(recurrence)).double()).train()
    ids = torch.arange(18).reshape(2, 9)
    losses = [model(input_ids=ids, labels=ids, use_cache=False).loss for model in (ours, literal)]
    for loss in losses:
        loss.backward()
    assert abs(float((losses[0] - losses[1]).detach())) < 1e-6  # Llama's norms compute in fp32
    embeddings = [model.get_input_embeddings().weight.grad for model in (ours, literal.model)]
    assert torch.allclose(*embeddings, rtol=1e-3, atol=1e-6)


def test_the_matched_transformer_has_as_many_parameters_and_no_more_than_it_needs() -> None:
    shape = settings(T2MLR(1, 2))
    wanted = count(recurrent(shape))
    found = matched(shape)
    assert count(found) >= wanted > count(transformer(shape, found.config.hidden_size - 4))


def test_a_benchmark_writes_a_table_and_json(tmp_path: Path) -> None:
    timed = dataclasses.replace(
        settings(T2MLR(1, 2)), measures=("train", "prefill", "decode"), rows=(1, 8)
    )
    text = bench(timed, tmp_path)
    assert text == (tmp_path / "bench.md").read_text().rstrip("\n")
    record = json.loads((tmp_path / "bench.json").read_text())
    assert set(record["results"]) == {"train step", "prefill", "decode, a token"}
    decoded = record["results"]["decode, a token"]
    assert {"transformer, 8 rows", "recurrent", "recurrent, 8 rows"} <= set(decoded)
    for measured in record["results"].values():
        assert measured[MATCHED]["ratio"] == 1
        assert all(timing["seconds"] > 0 for timing in measured.values())
    assert set(record["results"]["train step"]) == set(training_candidates(settings(T2MLR(1, 2))))


@pytest.mark.parametrize("compile", ["none", "regional"])
def test_candidates_are_compiled_if_asked_for(compile: Any, monkeypatch: Any) -> None:
    """But for the paper's loop."""
    asked: list[Any] = []
    monkeypatch.setattr(candidates, "compile_layers", asked.append)
    names = ("exact", "exact, the paper's loop taken literally")
    train_step(dataclasses.replace(settings(T2MLR(1, 2)), compile=compile, only=names))
    assert len(asked) == (3 if compile == "regional" else 0)


def test_memory_is_measured_in_a_process_of_its_own() -> None:
    """A step of sixteen times the tokens takes more memory, by what it keeps."""
    small = Bench(
        layers=2,
        width=64,
        head_width=16,
        vocabulary=50,
        tokens=64,
        batch=4,
        threads=1,
        recurrence=T2MLR(0, 1),
    )
    large = dataclasses.replace(small, tokens=1024)
    assert peak_memory(large, "transformer") - peak_memory(small, "transformer") > 30 * 2**20


def test_only_the_schemes_that_are_asked_for() -> None:
    asked = dataclasses.replace(settings(T2MLR(1, 2)), only=("scan(2,1)", "auto"))
    assert list(training_candidates(asked)) == ["transformer", MATCHED, "auto", "scan(2,1)"]
    with pytest.raises(ConfigError, match=r"only names 'scan\(2\)'"):
        training_candidates(dataclasses.replace(asked, only=("scan(2)",)))


def test_precision_and_attention_reach_every_candidate() -> None:
    asked = dataclasses.replace(
        settings(T2MLR(1, 2)), precision="bfloat16", attention="eager", only=("auto",)
    )
    for make in training_candidates(asked).values():
        model = make()
        assert model.config._attn_implementation == "eager"
        assert model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert find_pathway(model).fast_parameters()[0].dtype == torch.float32  # the gates stay


def test_flash_attention_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(ConfigError, match=r"flash_attention_2.*give both, or use sdpa"):
        Bench(attention="flash_attention_2")
