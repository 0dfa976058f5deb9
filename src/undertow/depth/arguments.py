"""What a forward is given besides the base model's own inputs: names, and what a loop takes, held
to their types."""

from __future__ import annotations

import difflib
import functools
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from undertow.depth.exits import EXIT_RULES, ExitRule
from undertow.depth.loop import Steps
from undertow.errors import ConfigError, shown

# Called after an iteration with its number and the states ``[B, T, D]`` before and after it.
Watcher = Callable[[int, torch.Tensor, torch.Tensor], None]
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


@dataclass(frozen=True)
class LoopArguments:
    """What one forward in depth is asked for, held to its types; None asks for what the model does
    by itself.

    Attributes:
        depth: iterations, of which the last `backward` carry gradient, or a pair: without and with.
        exit_rule: lets each token stop sooner. Without gradients only.
        warm_start: a continued row's first new token starts from the last token's state.
        resume: the new tokens have run so many iterations, on this cache, before it was cropped by
            them: go on there.
        state_seed: seed of the first states, one or one a row ``[B]``.
        initial: first states ``[B, T, D]`` instead of noise.
        watch: called after each iteration with its number and the states before and after.

    Raises:
        ConfigError: a value is of another type, or one of two arguments would be dropped. `depth`
            is not looked at: `steps_from` reads it.
    """

    depth: int | tuple[int, int] | Steps | None = None
    exit_rule: ExitRule | None = None
    warm_start: bool = False
    resume: int = 0
    state_seed: int | torch.Tensor | None = None
    initial: torch.Tensor | None = None
    watch: Watcher | None = None

    def __post_init__(self) -> None:
        check_exit_rule(self.exit_rule)
        resume = self.resume
        warm = self.warm_start
        seed = self.state_seed
        if not is_whole(resume) or resume < 0:
            raise ConfigError(
                f"resume is {shown(resume)}; give the whole number of iterations that the new "
                "tokens have run"
            )
        if type(warm) is not bool:
            raise ConfigError(f"warm_start is {shown(warm)}; give True or False")
        whole = (
            isinstance(seed, torch.Tensor)
            and not seed.is_floating_point()
            and seed.dtype != torch.bool
            and seed.ndim < 2
        )
        if seed is not None and not whole and not (is_whole(seed) and abs(int(seed)) < 2**63):
            raise ConfigError(
                f"state_seed is {shown(seed)}; give a whole number of 63 bits, or a tensor of one "
                "a row"
            )
        if self.watch is not None and not callable(self.watch):
            raise ConfigError(
                f"watch is {shown(self.watch)}; give a function of an iteration's number, the "
                "state before and after"
            )
        initial = self.initial
        if initial is not None and not isinstance(initial, torch.Tensor):
            raise ConfigError(
                f"initial is {shown(initial)}; give a tensor of states [batch, tokens, width]"
            )
        starts = {"resume": resume, "warm_start": warm, "initial": initial is not None}
        several = [name for name, asked in starts.items() if asked]
        if len(several) > 1:
            raise ConfigError(
                f"{' and '.join(several)} each say where the loop starts; give only one of them"
            )
        if seed is not None and (resume or initial is not None):
            raise ConfigError(
                f"state_seed would not be read beside {several[0]}, which says where the loop "
                "starts; leave it out"
            )


LOOP_ARGUMENTS = tuple(each.name for each in fields(LoopArguments))


def loop_arguments(given: Mapping[str, Any]) -> LoopArguments:
    """Those of `given` that are for the loop; None asks for nothing."""
    return LoopArguments(
        **{name: given[name] for name in LOOP_ARGUMENTS if given.get(name) is not None}
    )


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, Python's or NumPy's."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_exit_rule(rule: Any) -> None:
    """Refuse anything but an exit rule, or None for none."""
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
