"""What a trainer of TRL does beside a hosted model, which the model alone can notice.

DPO and its kind compare the model with a reference. Left to itself, TRL loads that from the folder
that the base model came from, and so without the recurrence: the comparison would be wrong from the
first step on, in silence. RL compares the model with itself a moment before; states that are not
exact differ between a token's decoding and training, which looks like a change of the policy.

Nothing tells a model who trains it. So where TRL is in use, a training forward looks up its own
call stack for a trainer.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

from torch import nn

from undertow.errors import ConfigError
from undertow.host.attachment import Attachment, has_recurrence


def check_trainer(attachment: Attachment) -> None:
    """Look at the TRL trainer whose training forward this is, if it is one's.

    Raises:
        ConfigError: its reference has no recurrence.
    """
    if "trl" not in sys.modules:
        return
    trainer = calling_trainer()
    if trainer is None:
        return
    name = type(trainer).__name__
    reference = getattr(trainer, "ref_model", None)
    if isinstance(reference, nn.Module) and not has_recurrence(reference):
        raise ConfigError(
            f"{name} compares this model with a reference that has no recurrence, as it was loaded "
            "from the base model's folder; give the trainer ref_model=copy.deepcopy(model), or "
            "save the model first and train what AutoModelForCausalLM loads from there"
        )
    solver = attachment.solver
    if hasattr(trainer, "reward_funcs") and attachment.pathway is not None and not solver.exact:
        warnings.warn(
            f"{name} trains on states that {solver.kind} only approximates, and generates with "
            "exact ones: the difference looks like a change of the policy; use "
            "undertow.set_solver(model, undertow.Sequential())",
            stacklevel=2,
        )


def calling_trainer() -> Any:
    """The innermost trainer of TRL that calls; None where none does."""
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if type(caller).__module__.startswith("trl.") and hasattr(caller, "accelerator"):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    return None
