"""The recurrent block site by site: what is written, run and read, in order."""

from __future__ import annotations

import torch

from undertow.host.looping import RunLayer
from undertow.pathways.base import Pathway

# The residual stream ``[B, n, D]`` at each read or written site, before and after what is written.
Streams = dict[int, tuple[torch.Tensor, torch.Tensor]]
# The block's output ``[B, n, D]``, and the readings.
Swept = tuple[torch.Tensor, list[torch.Tensor]]


def run_sites(
    pathway: Pathway,
    hidden: torch.Tensor,
    received: torch.Tensor | None,
    written: torch.Tensor | None,
    run: RunLayer,
    streams: Streams | None = None,
) -> Swept:
    """`hidden` ``[B, n, D]`` through the recurrent block, site by site: write, read, run a layer.

    What the tokens `received` ``[B, n, W]``, if anything, counts where `written` ``[B, n, 1]`` says
    so; None for everywhere. What passes the sites is noted in `streams`, if given.
    """
    readings = []
    for site in range(pathway.first_layer, pathway.stop_layer + 1):
        before = hidden
        if site in pathway.writes and received is not None:
            hidden = pathway.written_where(site, hidden, received, written)
        if streams is not None and site in pathway.sites:
            streams[site] = before, hidden
        if site in pathway.reads:
            readings.append(pathway.read(site, hidden))
        if site < pathway.stop_layer:
            hidden = run(site, hidden)
    return hidden, readings
