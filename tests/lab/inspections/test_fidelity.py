"""Fidelity: what equals the rollout is called enough, what does not is not, and the model is left
as it was."""

from __future__ import annotations

import pytest
import torch
import zoo
from helpers import hosted, tokens

import undertow
from undertow import ConfigError, Scan, Sequential
from undertow.host.attachment import find_attachment
from undertow.lab.inspections import measure_fidelity, recommendation


def batch() -> dict[str, torch.Tensor]:
    ids = tokens(2, 9)
    return {"input_ids": ids, "labels": ids}


def test_settings_run_to_their_end_are_faithful_and_short_ones_are_not() -> None:
    model = hosted("gpt2", "t2mlr-whole").double()
    found = measure_fidelity(
        model,
        batch(),
        {
            "to the end": Scan(9, 9),
            "adjoint to the end": Sequential("adjoint(9)"),
            "short": Sequential("adjoint(0)"),
        },
    )
    exact, end, adjoint, short = found
    for one in (end, adjoint):
        assert (
            abs(one.loss_error) < 1e-9
            and min(one.cosine_all, one.cosine_pathway, one.cosine_layer) > 1 - 1e-9
        )
        assert one.enough
    assert not short.enough and short.cosine_pathway < end.cosine_pathway - 1e-3
    assert recommendation(found).startswith(("to the end", "adjoint to the end"))
    assert recommendation([exact, short]).startswith("None of these")


def test_the_model_is_left_as_it_was() -> None:
    model = hosted("llama", "turboconn-1")
    undertow.set_solver(model, Scan(3, 1))
    parameter = next(model.parameters())
    parameter.grad = torch.ones_like(parameter)
    measure_fidelity(model, batch(), {"scan": Scan(1, 1)})
    assert find_attachment(model).solver == Scan(3, 1)
    assert torch.equal(parameter.grad, torch.ones_like(parameter))


def test_a_model_without_recurrence_is_refused() -> None:
    with pytest.raises(ConfigError, match="no recurrence"):
        measure_fidelity(zoo.build("llama"), batch())
