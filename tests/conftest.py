"""One thread a process and no chatter: what every test runs under."""

import logging
import warnings
from collections.abc import Iterator

import pytest
import torch
import transformers

from undertow import registry

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Nothing that transformers has to say about tiny random models is news."""
    warnings.filterwarnings("ignore", module="transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)


@pytest.fixture
def own_kinds() -> Iterator[None]:
    """Forgets afterwards what a test registers."""
    before = {base: dict(known) for base, known in registry._families.items()}
    yield
    for base, known in registry._families.items():
        known.clear()
        known.update(before.get(base, {}))
