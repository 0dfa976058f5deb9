"""TurboConn: dense connections from higher layers to lower layers of later tokens (arXiv
2602.17993)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from undertow.errors import ConfigError, nearest
from undertow.pathways.base import Decode, Pathway, Recurrence, check_layer
from undertow.registry import register
from undertow.settings import alternative

Connection = tuple[int, int]

MOST = 1_000_000
"""The largest lag and rank that anyone means."""


@register
class TurboConn(Recurrence):
    """Connections that carry a low-rank projection of a layer's output to a lower layer's output,
    `lag` tokens later."""

    kind: ClassVar[str] = "turboconn"
    alternatives: ClassVar[tuple[str, ...]] = ("preset", "wired")

    connections: tuple[Connection, ...]
    """(source layer, destination layer) pairs, 0-based; a source is never below its destination."""
    lag: Annotated[int, Field(le=MOST)] = 4
    """How many tokens back the state comes from: the paper's group size. Small is deep, large
    trains fast."""
    alpha: float = 100.0
    """Multiplier of what a connection adds. The paper pairs a small lag with a large alpha and a
    large lag with 1."""
    rank: Annotated[int, Field(ge=1, le=MOST)] = 120
    """Rank of each connection; it has 2 * rank * width + rank + width parameters."""
    normalize: bool = False
    """Whether connections read states at unit root mean square, which the paper's do not; for large
    residual streams."""

    def __post_init__(self) -> None:
        pairs = self.connections
        if not pairs:
            raise ConfigError(
                "TurboConn has no connections; give at least one (source layer, destination layer) "
                "pair"
            )
        for source, destination in pairs:
            if source < destination:
                raise ConfigError(
                    f"connection {source} -> {destination} goes up: a state must enter at or below "
                    f"the layer that it left; swap it to {destination} -> {source}"
                )
        if len(set(pairs)) < len(pairs):
            twice = next(pair for pair in pairs if pairs.count(pair) > 1)
            raise ConfigError(f"connection {twice[0]} -> {twice[1]} is listed twice; list it once")
        if self.lag < 1:
            raise ConfigError(
                f"lag is {self.lag}, but a state can only reach a later token; use 1 or more"
            )

    @classmethod
    @alternative
    def wired(
        cls,
        sources: Sequence[int],
        destinations: Sequence[int],
        min_gap: int,
        lag: int = 4,
        alpha: float = 100.0,
        rank: int = 120,
        normalize: bool = False,
    ) -> TurboConn:
        """The paper's wiring rule (appendix A.5): every pair of the two lists that is at least
        `min_gap` layers apart."""
        pairs = tuple((s, d) for s in sources for d in destinations if s - d >= min_gap)
        if not pairs:
            raise ConfigError(
                f"no source lies {min_gap} layers above a destination; use a smaller min_gap"
            )
        return cls(pairs, lag=lag, alpha=alpha, rank=rank, normalize=normalize)

    @classmethod
    @alternative
    def preset(
        cls, name: str, lag: int = 4, alpha: float = 100.0, rank: int = 120, normalize: bool = False
    ) -> TurboConn:
        """The wiring that the paper used for "llama-3.2-1b", "llama-3.1-8b" or "qwen3-1.7b"
        (appendix A.5)."""
        if name not in PRESETS:
            raise ConfigError(
                f"no TurboConn preset is called {name!r}{nearest(name, PRESETS)}; there are "
                f"{', '.join(PRESETS)}"
            )
        sources, destinations, min_gap = PRESETS[name]
        return cls.wired(sources, destinations, min_gap, lag, alpha, rank, normalize)

    def advice(self, pretrained: bool, learning_rate: float) -> str | None:
        """What there is against this lag and alpha at this learning rate, in a sentence; None if
        nothing.

        The first two are the paper's (section 4.4.2), the last is our own.

        With alpha 100, Parity fell to chance at a lag of 8 and of 16, and rose to 100 % at 4 and 6.
        With alpha 1 every lag gained, but a small one less than it could. The second holds for
        pretrained models: those trained from scratch at high learning rates make use of the
        connections without a multiplier. Under Adam a connection's effect grows by alpha times the
        learning rate a step: 1.92e-3 in the paper; in ours 0.01 learned Parity at lag 1 with every
        seed, and 0.1 ended in NaN.
        """
        if self.lag >= LARGE_LAG and self.alpha >= LARGE_ALPHA:
            return (
                f"lag {self.lag} with alpha {self.alpha:g} goes against TurboConn's paper, where "
                f"Parity fell to chance with alpha 100 from lag {LARGE_LAG} on; use alpha 1, or a "
                "lag of 4 to 6"
            )
        if (
            pretrained
            and self.lag <= SMALL_LAG
            and self.alpha <= SMALL_ALPHA
            and 100 * learning_rate <= LARGE_GROWTH
        ):
            return (
                f"lag {self.lag} with alpha {self.alpha:g} goes against TurboConn's paper, where a "
                "small lag gained more with alpha 100; use that, or a larger lag, which trains "
                "faster"
            )
        if self.alpha * learning_rate > LARGE_GROWTH:
            return (
                f"alpha {self.alpha:g} at a learning rate of {learning_rate:g} is a product above "
                f"{LARGE_GROWTH:g}, where training diverges as a rule; use an alpha of "
                f"{LARGE_GROWTH / 2 / learning_rate:.2g} or less"
            )
        return None

    def build(self, layers: int, width: int, decode: Decode | None = None) -> TurboConnPathway:
        for source, destination in self.connections:
            check_layer("TurboConn's source layer", source, layers)
            check_layer("TurboConn's destination layer", destination, layers)
        return TurboConnPathway(self, width)


# What the paper's advice calls large and small: it tried lags 4, 6, 8 and 16 with alpha 1 and 100.
LARGE_LAG = 8
LARGE_ALPHA = 50.0
SMALL_LAG = 4
SMALL_ALPHA = 2.0
# Alpha times the learning rate: see `TurboConn.advice`.
LARGE_GROWTH = 0.02

PRESETS: dict[str, tuple[range, range, int]] = {
    "llama-3.2-1b": (range(6, 15, 2), range(0, 9, 2), 6),
    "llama-3.1-8b": (range(14, 31, 2), range(7, 24, 2), 7),
    "qwen3-1.7b": (range(12, 28, 3), range(4, 20, 3), 8),
}


class Up(nn.Module):
    """All connections that end at one layer, as one projection: ``[..., connections * rank] ->
    [..., width]``.

    Each connection keeps a bias of its own, as in the paper's formulation, where the biases add up.
    """

    def __init__(self, connections: int, rank: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, connections * rank))
        self.bias = nn.Parameter(torch.zeros(connections, width))

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return F.linear(state, self.weight, self.bias.sum(0))


class TurboConnPathway(Pathway):
    """The projections of TurboConn, one `down` a source layer and one `up` a destination layer.

    The state ``[B, T, connections * rank]`` holds the connections sorted by destination, so that
    each `up` takes a slice of it. `up` starts at zero and `down` at random: the model starts as the
    base model and still learns.
    """

    def __init__(self, settings: TurboConn, width: int) -> None:
        super().__init__()
        rank = settings.rank
        self.lag = settings.lag
        self.alpha = settings.alpha
        self.normalize = settings.normalize
        mend = "use" if self.normalize else "attach TurboConn(..., normalize=True), or use"
        self.remedy = f"{mend} a smaller alpha or learning rate"
        by_source = sorted(settings.connections)
        by_destination = sorted(settings.connections, key=lambda pair: (pair[1], pair[0]))
        self.state_width = rank * len(by_source)
        self.reads = frozenset(source + 1 for source, _ in by_source)
        self.writes = frozenset(destination + 1 for _, destination in by_source)
        self.down = nn.ModuleDict()
        for source in sorted({source for source, _ in by_source}):
            self.down[str(source)] = nn.Linear(width, rank * sum(s == source for s, _ in by_source))
        self.up = nn.ModuleDict()
        self.slices: dict[int, tuple[int, int]] = {}  # the first entry and how many
        offset = 0
        for destination in sorted({destination for _, destination in by_source}):
            count = sum(d == destination for _, d in by_source)
            self.up[str(destination)] = Up(count, rank, width)
            self.slices[destination] = (offset, count * rank)
            offset += count * rank
        # Readings arrive sorted by source; `order` sorts their connections by destination.
        self.rank = rank
        self.order = [by_source.index(pair) for pair in by_destination]
        self._places: dict[torch.device, torch.Tensor] = {}

    def write(self, site: int, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return self.alpha * self.raised(site, state)

    def written(self, site: int, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return torch.add(hidden, self.raised(site, state), alpha=self.alpha)

    def raised(self, site: int, state: torch.Tensor) -> torch.Tensor:
        """What the connections that end at a site make of the state, ``[B, n, D]``."""
        destination = site - 1
        raised: torch.Tensor = self.up[str(destination)](
            state.narrow(-1, *self.slices[destination])
        )
        return raised

    def read(self, site: int, hidden: torch.Tensor) -> torch.Tensor:
        if self.normalize:
            hidden = F.rms_norm(hidden, hidden.shape[-1:])
        reading: torch.Tensor = self.down[str(site - 1)](hidden)
        return reading

    def update(self, readings: list[torch.Tensor], state: torch.Tensor | None) -> torch.Tensor:
        if len(self.order) == 1:
            return readings[0]
        by_source = torch.cat(readings, dim=-1)
        return by_source.index_select(-1, self.places(by_source.device))

    def places(self, device: torch.device) -> torch.Tensor:
        """Where the entries of a state, which has its connections sorted by destination, are among
        those of the readings ``[connections * rank]``."""
        if device not in self._places:
            with torch.inference_mode(False):  # a graph may keep it
                first = torch.tensor(self.order, device=device)[:, None] * self.rank
                places = first + torch.arange(self.rank, device=device)
                self._places[device] = places.flatten()
        return self._places[device]

    def scan(
        self,
        readings: list[torch.Tensor],
        initial: torch.Tensor | None,
        present: torch.Tensor | None,
    ) -> torch.Tensor:
        return self.update(readings, None)  # it does not look at the state
