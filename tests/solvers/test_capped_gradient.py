"""`Auto` takes at most four products; where these are too few, it says so, once."""

import warnings

import pytest
import torch
from helpers import tokens
from leaky import leaky
from torch import nn

from undertow import Auto
from undertow.host.attachment import find_attachment
from undertow.solvers import Plan, Plans, auto


def step(model: nn.Module, length: int) -> list[str]:
    """One training step; what was said meanwhile."""
    ids = tokens(2, length)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model(ids, labels=ids, use_cache=False).loss.backward()
    return [str(each.message) for each in said if "products" in str(each.message)]


def chained(gain: float) -> nn.Module:
    """A model that writes what it remembers `gain` times as large."""
    model: nn.Module = leaky()
    with torch.no_grad():
        find_attachment(model).pathway.up.weight.mul_(gain)
    find_attachment(model).solver = Auto(every=1)
    return model


def plan(model: nn.Module) -> Plan:
    (found,) = find_attachment(model).plans.by_length.values()
    return found


def test_too_few_products_are_told_once_and_kept_in_the_plan() -> None:
    model = chained(100)
    (said,) = step(model, 16)
    assert "adjoint(0.1), after 4 products" in said
    assert plan(model).capped
    assert (
        Plans.from_mapping(find_attachment(model).plans.to_mapping())
        == find_attachment(model).plans
    )
    assert step(model, 16) == []  # measured again, and said before


def test_control_where_they_are_enough_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = chained(0)
    assert step(model, 16) == [] and not plan(model).capped
    assert step(chained(100), 4) == []  # four products are all that four tokens have
    monkeypatch.setattr(auto, "MOST_PRODUCTS", 15)
    model = chained(100)
    assert step(model, 16) == [] and not plan(model).capped
