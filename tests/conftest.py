"""One thread a process and no chatter: what every test runs under."""

import logging
import warnings

import pytest
import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Nothing that transformers has to say about tiny random models is news."""
    warnings.filterwarnings("ignore", module="transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
