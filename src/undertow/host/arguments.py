"""The arguments of a layer call, cut to a group of tokens.

The backbone computes masks, positions and their embeddings once, for all tokens. A rollout runs the
layers on a few tokens at a time and cuts what it needs out of these. Which axes of which argument
count query tokens and which count keys is learned once a model, by watching two forwards of
different lengths: no architecture is described by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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


def replace(call: Call, change: Callable[[Path, Any], Any]) -> Call:
    """The call with each leaf replaced by what `change` makes of it."""
    args, kwargs = _replace((), [list(call[0]), call[1]], change)
    return tuple(args), kwargs


# Not a closure in `replace`: one that calls itself is a reference cycle, and would keep a rollout's
# buffers alive.
def _replace(path: Path, value: Any, change: Callable[[Path, Any], Any]) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(
            _replace((*path, index), item, change) for index, item in enumerate(value)
        )
    if isinstance(value, dict):
        return {key: _replace((*path, key), item, change) for key, item in value.items()}
    return change(path, value)


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

    def change(path: Path, value: Any) -> Any:
        if path not in layout.rows or not isinstance(value, torch.Tensor):
            return value
        axis, each = layout.rows[path]
        if value.shape[axis] != batch * each:  # one for all rows
            return value
        index = (rows[:, None] * each + torch.arange(each, device=rows.device)).flatten()
        return value.index_select(axis, index.to(value.device))

    return replace(call, change)


@dataclass
class Group:
    """Tokens `start` to `stop`, the cache that their layers use, and what was cut for them so
    far."""

    start: int
    stop: int
    cache: Cache
    device: torch.device
    done: dict[Any, Any] = field(default_factory=dict)


class Cutter:
    """Cuts the calls of some layers to groups of tokens, each distinct tensor and call once a
    group."""

    def __init__(self, calls: list[Call], layouts: list[CallLayout], layers: range) -> None:
        """`calls` and `layouts` are those of all layers, `layers` the numbers of those to cut."""
        self.calls, self.layouts = calls, layouts
        # Most stacks call all their layers with the same objects: one cut serves them all.
        first = layers[0]
        self.shared = {
            layer: self._same(calls[first], calls[layer]) and layouts[layer] == layouts[first]
            for layer in layers
        }

    @staticmethod
    def _same(one: Call, other: Call) -> bool:
        return (
            len(one[0]) == len(other[0])
            and one[1].keys() == other[1].keys()
            and all(a is b for (_, a), (_, b) in zip(leaves(one), leaves(other), strict=True))
        )

    def cut(self, layer: int, group: Group, keys: tuple[int, int]) -> Call:
        """The call of `layer` for a group; `keys` is the range of the captured key axis that the
        layer will see."""
        if not self.shared[layer]:
            return self._cut(layer, group, keys)
        memo = ("call", keys)
        if memo not in group.done:
            group.done[memo] = self._cut(layer, group, keys)
        call: Call = group.done[memo]
        return call

    def _cut(self, layer: int, group: Group, keys: tuple[int, int]) -> Call:
        layout = self.layouts[layer]
        count = group.stop - group.start

        def change(path: Path, value: Any) -> Any:
            if path == layout.cache:
                return group.cache
            if value is None and path in layout.masks and count > 1:
                return self._causal(group, keys)
            axes = layout.axes.get(path) if isinstance(value, torch.Tensor) else None
            if axes is None:
                return value
            memo = (id(value), keys)
            if memo not in group.done:
                for axis, role in enumerate(axes):
                    if role == "query":
                        value = value.narrow(axis, group.start, count)
                    elif role == "key":
                        value = value.narrow(axis, keys[0], keys[1] - keys[0])
                group.done[memo] = value
            return group.done[memo]

        return replace(self.calls[layer], change)

    @staticmethod
    def _causal(group: Group, keys: tuple[int, int]) -> torch.Tensor:
        """The mask that a missing one stands for, ``[1, 1, n, keys]``: the last key is the last
        query's own."""
        past = keys[1] - group.stop
        query = torch.arange(group.start + past, keys[1], device=group.device)[:, None]
        return (torch.arange(keys[0], keys[1], device=group.device)[None] <= query)[None, None]
