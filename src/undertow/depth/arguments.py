"""What a forward is given besides the base model's own inputs: names, and what a loop takes, held
to their types."""

from __future__ import annotations

import difflib
import functools
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from undertow.depth.exits import EXIT_RULES, ExitRule
from undertow.errors import ConfigError
from undertow.fields import shown

# What others call them.
SYNONYMS = {
    "num_steps": "depth",
    "iterations": "depth",
    "num_iterations": "depth",
    "loops": "depth",
    "num_loops": "depth",
}
SYNONYMS |= {"seed": "state_seed", "exit": "exit_rule", "recurrence": "recurrent_mask"}
# What looks like ours, and is a word that others use for something else.
OTHERS = frozenset({"batch", "states"})
# How alike a name must be to one of ours to be taken for it.
ALIKE = 0.75


def check_loop_arguments(given: Mapping[str, Any]) -> None:
    """Refuse values of another type than their argument's, and pairs of which one would be dropped.
    None asks for nothing.

    `depth` is not looked at: `steps_from` reads it.

    Raises:
        ConfigError: a value is of another type, or two arguments cannot go together.
    """
    check_exit_rule(given.get("exit_rule"))
    resume, warm, seed, watch = (
        given.get(name) for name in ("resume", "warm_start", "state_seed", "watch")
    )
    if resume is not None and (not is_whole(resume) or resume < 0):
        raise ConfigError(
            f"resume is {shown(resume)}; give the whole number of iterations that the new tokens "
            "have run"
        )
    if warm is not None and type(warm) is not bool:
        raise ConfigError(f"warm_start is {shown(warm)}; give True or False")
    whole = (
        isinstance(seed, torch.Tensor)
        and not seed.is_floating_point()
        and seed.dtype != torch.bool
        and seed.ndim < 2
    )
    if seed is not None and not whole and not (is_whole(seed) and abs(seed) < 2**63):
        raise ConfigError(
            f"state_seed is {shown(seed)}; give a whole number of 63 bits, or a tensor of one a row"
        )
    if watch is not None and not callable(watch):
        raise ConfigError(
            f"watch is {shown(watch)}; give a function of an iteration's number, the state before "
            "and after"
        )
    initial = given.get("initial")
    if initial is not None and not isinstance(initial, torch.Tensor):
        raise ConfigError(
            f"initial is {shown(initial)}; give a tensor of states [batch, tokens, width]"
        )
    starts = {"resume": bool(resume), "warm_start": bool(warm), "initial": initial is not None}
    several = [name for name, asked in starts.items() if asked]
    if len(several) > 1:
        raise ConfigError(
            f"{' and '.join(several)} each say where the loop starts; give only one of them"
        )
    if seed is not None and (bool(resume) or initial is not None):
        raise ConfigError(
            f"state_seed would not be read beside {several[0]}, which says where the loop starts; "
            "leave it out"
        )


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, Python's or NumPy's."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_exit_rule(rule: Any) -> None:
    """Refuse what is given as an exit rule and is none; None asks for none."""
    if rule is None or isinstance(rule, ExitRule):
        return
    named = rule if isinstance(rule, type) and issubclass(rule, ExitRule) else None
    named = EXIT_RULES.get(rule) if isinstance(rule, str) else named
    example = "LatentDifference(0.03)" if named is None else f"{named.__name__}(...)"
    raise ConfigError(f"exit_rule is {shown(rule)}; give one such as undertow.depth.{example}")


def refuse_near(owner: str, unknown: Iterable[str], ours: Sequence[str]) -> None:
    """Refuse the first of these names that is near one of ours, in another spelling or as others
    call it."""
    for name in unknown:
        if (meant := _meant(name, tuple(ours))) is not None:
            raise ConfigError(
                f"{name} is no argument of {owner}, which would drop it unread; did you mean "
                f"{meant!r}?"
            )


@functools.lru_cache(maxsize=256)  # each decoded token may ask
def _meant(name: str, ours: tuple[str, ...]) -> str | None:
    if name.lower() in OTHERS:
        return None
    plain = {each.replace("_", ""): each for each in ours}
    near = difflib.get_close_matches(
        name.lower().replace("_", "").replace("-", ""), plain, n=1, cutoff=ALIKE
    )
    meant = SYNONYMS.get(name) or (plain[near[0]] if near else None)
    return meant if meant in ours else None
