"""The arguments of a layer call, cut to a group of tokens.

The backbone computes masks, positions and their embeddings once, for all tokens. A rollout runs the
layers on a few tokens at a time and cuts what it needs out of these. Which axes of which argument
count query tokens and which count keys is learned once a model, by watching two forwards of
different lengths: no architecture is described by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers.cache_utils import Cache

from undertow.errors import UnsupportedArchitectureError

Call = tuple[tuple[Any, ...], dict[str, Any]]
Path = tuple[Any, ...]
# For each axis of a tensor: "query", "key", or None where it does not count tokens.
Axes = tuple[str | None, ...]


@dataclass
class CallLayout:
    """What is learned of one layer's arguments.

    Attributes:
        cache: the path of the cache; None where the layer takes none.
        axes: the axes that count tokens, by the argument's path.
        masks: the paths of the attention masks, which have both a query and a key axis.
        inverted: those of them in which True says that a token does not attend.
        rows: the axis that counts rows, by the argument's path, with how many entries there are for
            each row.
    """

    cache: Path | None = None
    axes: dict[Path, Axes] = field(default_factory=dict)
    masks: frozenset[Path] = frozenset()
    inverted: frozenset[Path] = frozenset()
    rows: dict[Path, tuple[int, int]] = field(default_factory=dict)

    @cached_property
    def changing(self) -> list[Path]:
        """Where a call for a group of tokens differs from that for all."""
        return [*self.axes, *(path for path in (self.cache,) if path is not None)]


def leaves(call: Call) -> Iterator[tuple[Path, Any]]:
    """Every argument with its path; tuples, lists and dicts of tensors are entered."""
    yield from _leaves((), [list(call[0]), call[1]])


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _leaves((*path, index), item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves((*path, key), item)
    else:
        yield path, value


def found(call: Call, paths: Iterable[Path]) -> Iterator[tuple[Path, Any]]:
    """What a call has at those of the paths that it has."""
    for path in paths:
        value: Any = call
        try:
            for step in path:
                value = value[step]
        except (IndexError, KeyError, TypeError):  # some models pass none at all
            continue
        yield path, value


def changed(call: Call, values: Mapping[Path, Any]) -> Call:
    """The call with other values at some of the paths that it has."""
    parts: Any = [list(call[0]), dict(call[1])]
    for (part, name, *inner), value in values.items():
        parts[part][name] = _changed(parts[part][name], inner, value) if inner else value
    return tuple(parts[0]), parts[1]


def _changed(container: Any, path: Sequence[Any], value: Any) -> Any:
    """The tuple, list or dictionary with another value at a path."""
    step, *inner = path
    items = dict(container) if isinstance(container, dict) else list(container)
    items[step] = _changed(container[step], inner, value) if inner else value
    return type(container)(items)


def find_cache(call: Call) -> Cache | None:
    """The cache among the arguments, whatever its keyword is called."""
    return next((value for _, value in leaves(call) if isinstance(value, Cache)), None)


def cache_of(call: Call, layout: CallLayout) -> Cache | None:
    """The cache among the arguments of a call whose layout is known; each token of a generation
    asks."""
    value = None if layout.cache is None else at(call, layout.cache)
    return value if isinstance(value, Cache) else None


def attention_masks(calls: list[Call], layouts: list[CallLayout]) -> list[torch.Tensor]:
    """Which keys each token attends to, ``[B, 1, T, keys]``, by the masks that the layers were
    called with, each once.

    There are none where none was needed: for all earlier tokens.
    """
    found: dict[int, torch.Tensor] = {}
    for call, layout in zip(calls, layouts, strict=True):
        for path in layout.masks:
            mask = at(call, path)
            if isinstance(mask, torch.Tensor) and mask.ndim == 4 and id(mask) not in found:
                found[id(mask)] = ~visible(mask) if path in layout.inverted else visible(mask)
    return list(found.values())


def visible(mask: torch.Tensor) -> torch.Tensor:
    """Which keys a mask lets through: a boolean one says so, another adds hardly anything to their
    scores."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def at(call: Call, path: Path) -> Any:
    """What is at a path in a call; None where it has none."""
    value: Any = call
    for step in path:
        try:
            value = value[step]
        except (IndexError, KeyError, TypeError):  # some models pass none at all
            return None
    return value


def learn_layout(name: str, calls: list[Call], lengths: list[int]) -> CallLayout:
    """Compare the same layer's calls in forwards that differ only in their numbers of new and of
    cached tokens."""
    layout = CallLayout()
    masks, inverted = set(), set()
    first, second = (dict(leaves(call)) for call in calls)
    for path, value in first.items():
        if isinstance(value, Cache):
            layout.cache = path
        elif isinstance(value, torch.Tensor):
            sizes = list(zip(value.shape, second[path].shape, strict=True))
            axes: Axes = tuple(
                None if size[0] == size[1] else "query" if list(size) == lengths else "key"
                for size in sizes
            )
            if any(axes):
                layout.axes[path] = axes
            if "query" in axes and "key" in axes:
                masks.add(path)
                # The last row has no padding, so that each of its tokens attends to itself, which
                # is its last key.
                if (
                    value.dtype == torch.bool
                    and not value[-1, 0].diagonal(value.shape[-1] - value.shape[-2]).any()
                ):
                    inverted.add(path)
        elif type(value).__name__ == "BlockMask":
            raise UnsupportedArchitectureError(
                f"{name} uses flex attention, whose masks cannot be cut to a group of tokens; "
                'load the model with attn_implementation="sdpa" or "eager"'
            )
    layout.masks, layout.inverted = frozenset(masks), frozenset(inverted)
    return layout


def learn_rows(layout: CallLayout, calls: tuple[Call, Call], batches: tuple[int, int]) -> None:
    """Compare the same layer's calls in forwards that differ only in their numbers of rows."""
    first, second = (dict(leaves(call)) for call in calls)
    for path, value in first.items():
        if isinstance(value, torch.Tensor):
            for axis, size in enumerate(value.shape):
                if size != second[path].shape[axis]:
                    layout.rows[path] = (axis, size // batches[0])


def pick_rows(call: Call, layout: CallLayout, rows: torch.Tensor, batch: int) -> Call:
    """The call for some rows ``[b]`` of a batch."""
    values = {}
    for path, value in found(call, layout.rows):
        axis, each = layout.rows[path]
        # Otherwise there is one for all rows.
        if isinstance(value, torch.Tensor) and value.shape[axis] == batch * each:
            index = (rows[:, None] * each + torch.arange(each, device=rows.device)).flatten()
            values[path] = value.index_select(axis, index.to(value.device))
    return changed(call, values)


@dataclass
class Group:
    """Tokens `start` to `stop`, the cache that their layers use, if it is known yet, and what was
    cut for them so far."""

    start: int
    stop: int
    cache: Cache | None
    device: torch.device
    done: dict[Any, Any] = field(default_factory=dict)


class Cutter:
    """Cuts the calls of some layers to groups of tokens, each distinct tensor and call once a
    group."""

    def __init__(self, calls: list[Call], layouts: list[CallLayout], layers: range) -> None:
        """`calls` and `layouts` are those of all layers, `layers` the numbers of those to cut."""
        self.calls, self.layouts = calls, layouts
        # Most stacks call all their layers with the same objects: one cut serves them all.
        first = layers.start
        self.shared = {
            layer: self._same(calls[first], calls[layer]) and layouts[layer] == layouts[first]
            for layer in layers
        }

    @staticmethod
    def _same(one: Call, other: Call) -> bool:
        ours, theirs = (*one[0], *one[1].values()), (*other[0], *other[1].values())
        return (
            one[1].keys() == other[1].keys()
            and len(ours) == len(theirs)
            and all(a is b for a, b in zip(ours, theirs, strict=True))
        )

    def cut(self, layer: int, group: Group, keys: tuple[int, int]) -> Call:
        """The call of `layer` for a group; `keys` is the range of the captured key axis that the
        layer will see."""
        shared = ("call", keys)
        if self.shared[layer] and shared in group.done:
            done: Call = group.done[shared]
            return done
        call, layout = self.calls[layer], self.layouts[layer]
        count = group.stop - group.start
        values: dict[Path, Any] = {}
        for path, value in found(call, layout.changing):
            memo = (id(value), keys)
            if path == layout.cache:
                values[path] = group.cache
            elif value is None and path in layout.masks and count > 1:
                values[path] = self._causal(group, keys)
            elif isinstance(value, torch.Tensor):
                if memo not in group.done:
                    for axis, role in enumerate(layout.axes[path]):
                        if role == "query":
                            value = value.narrow(axis, group.start, count)
                        elif role == "key":
                            value = value.narrow(axis, keys[0], keys[1] - keys[0])
                    group.done[memo] = value
                values[path] = group.done[memo]
        cut = changed(call, values)
        if self.shared[layer]:
            group.done[shared] = cut
        return cut

    @staticmethod
    def _causal(group: Group, keys: tuple[int, int]) -> torch.Tensor:
        """The mask that a missing one stands for, ``[1, 1, n, keys]``: the last key is the last
        query's own."""
        past = keys[1] - group.stop
        query = torch.arange(group.start + past, keys[1], device=group.device)[:, None]
        return (torch.arange(keys[0], keys[1], device=group.device)[None] <= query)[None, None]
