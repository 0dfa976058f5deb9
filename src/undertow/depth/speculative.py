"""Self-speculative decoding: a model drafts with few iterations and verifies its drafts with many,
all at once.

Exact under greedy decoding: the text is that of plain decoding at full depth. A draft is not thrown
away. Verification goes on from the drafted tokens' states and from their keys and values of the
iterations that the draft has run.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from undertow.depth.cache import DepthCache, cache_keyword, rewind
from undertow.depth.handle import depth_handle
from undertow.depth.loop import check_depth
from undertow.errors import ConfigError


@dataclass
class Speculation:
    """What self-speculative decoding did.

    Attributes:
        sequences: prompt and new tokens ``[B, T + n]``; padding after a row's end.
        drafted, accepted: tokens that were drafted, and those of them that were kept, over all rows
            that were running.
        rounds: drafts, each followed by one verification.
        cache: the cache at the end.
    """

    sequences: torch.Tensor
    drafted: int
    accepted: int
    rounds: int
    cache: DepthCache

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


@torch.no_grad()
def generate_speculative(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    max_new_tokens: int = 64,
    depth: int = 32,
    draft_depth: int = 4,
    lookahead: int = 4,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
) -> Speculation:
    """Greedy text after the prompts ``[B, T]``, left-padded where the mask ``[B, T]`` says so.

    A row ends with one of `eos_token_id`, and `pad_token_id` follows; by default both are the
    generation config's, as in `generate()`. An empty `eos_token_id` lets every row run on.

    Each round drafts `lookahead` tokens at `draft_depth`, runs the iterations from `draft_depth` to
    `depth` for all of them in one forward, and keeps what full depth would have written: at least
    one token. All rows go on by as many tokens as the row that kept the fewest, so more rows make
    shorter rounds.

    Raises:
        ConfigError: the draft is as deep as the verification, a number is below 1, or the model has
            no recurrence in depth.
    """
    check_depth("depth", depth)
    check_depth("draft_depth", draft_depth)
    if draft_depth >= depth:
        raise ConfigError(
            f"draft_depth {draft_depth} is not below depth {depth}: there would be nothing to "
            "verify"
        )
    for name, number in (("lookahead", lookahead), ("max_new_tokens", max_new_tokens)):
        if type(number) is not int or number < 1:
            raise ConfigError(f"{name} is {number!r}; use a whole number, 1 or more")
    depth_handle(model)  # refuses a model that has none
    parameters = inspect.signature(model.forward).parameters
    ends = model.generation_config.eos_token_id if eos_token_id is None else eos_token_id
    ends = torch.tensor(
        [] if ends is None else ends, dtype=torch.long, device=input_ids.device
    ).flatten()
    if pad_token_id is None:
        pad_token_id = model.generation_config.pad_token_id
    if pad_token_id is None:  # as `generate()` has it
        pad_token_id = int(ends[0]) if len(ends) else 0
    batch, prompt = input_ids.shape
    total = prompt + max_new_tokens
    mask = torch.ones(batch, total, dtype=torch.long, device=input_ids.device)
    if attention_mask is not None:
        mask[:, :prompt] = attention_mask
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DepthCache(tokens=total)

    def run(tokens: torch.Tensor, length: int, **settings: Any) -> torch.Tensor:
        """The likeliest next tokens ``[B, n]`` after each of the `tokens`, of which the last is
        number `length`."""
        held = {cache_keyword(): cache, "use_cache": True}
        inputs = {**held, "attention_mask": mask[:, :length], **settings}
        if "position_ids" in parameters:
            inputs["position_ids"] = positions[:, length - tokens.shape[1] : length]
        found: torch.Tensor = model(tokens, **inputs).logits.argmax(-1)
        return found

    running = torch.ones(batch, dtype=torch.bool, device=input_ids.device)
    sequences = input_ids
    drafted = accepted = rounds = 0

    def write(tokens: torch.Tensor) -> None:
        nonlocal sequences, running
        for column in tokens.T:
            column = torch.where(running, column, pad_token_id)
            sequences = torch.cat([sequences, column[:, None]], dim=1)
            running = running & ~torch.isin(column, ends)

    latest = run(input_ids, prompt, depth=depth, logits_to_keep=1)
    write(latest)
    while sequences.shape[1] < total and bool(running.any()):
        done = sequences.shape[1] - 1  # tokens in the cache
        count = min(lookahead, total - 1 - done)
        draft = [latest]
        for ahead in range(count):
            draft.append(run(draft[-1], done + ahead + 1, depth=draft_depth))
        rewind(cache, count)
        target = run(torch.cat(draft[:-1], dim=1), done + count, depth=depth, resume=draft_depth)
        right = (torch.cat(draft[1:], dim=1) == target).long().cumprod(dim=1).sum(dim=1)
        kept = int(right[running].min())
        rounds += 1
        drafted += count * int(running.sum())
        accepted += kept * int(running.sum())
        new = min(kept + 1, count)
        rewind(cache, count - new)
        write(target[:, :new])
        latest = target[:, new - 1 : new]
    return Speculation(sequences, drafted, accepted, rounds, cache)
