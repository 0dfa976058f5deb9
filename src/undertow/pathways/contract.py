"""Whether a pathway keeps the contract of `base.py`, tried once on small random readings, where it
is attached.

Solvers call `update` for one group of tokens or for all at once, and `scan` in its place; they hand
over zeros where there is no state. A pathway for which these differ would give each solver other
numbers, without an error.
"""

from __future__ import annotations

import torch

from undertow.errors import ConfigError
from undertow.pathways.base import Pathway, scan_by_update

# Rows of the trial, and groups of `lag` tokens, the last of them short.
ROWS, GROUPS = 2, 4


def check_sites(pathway: Pathway, layers: int) -> None:
    """Refuse sites that the model does not have, or that no solver would come by.

    Raises:
        ConfigError: a site is none of 0 to `layers`, there are none, or one lies outside the
            recurrent block.
    """
    name = type(pathway).__name__
    if not pathway.reads or not pathway.writes:
        raise ConfigError(
            f"{name} {'writes' if pathway.reads else 'reads'} nowhere; give it a site to read and "
            "one to write"
        )
    for site in sorted(pathway.reads | pathway.writes):
        if not 0 <= site <= layers:
            raise ConfigError(
                f"{name} uses site {site}, but the model's sites are 0 to {layers}; choose among "
                "these"
            )
    first, last = min(pathway.writes), max(pathway.reads)
    for site in sorted(pathway.reads | pathway.writes):
        if not first <= site <= last:
            verb = "reads" if site in pathway.reads else "writes"
            raise ConfigError(
                f"{name} {verb} at site {site}, outside its recurrent block, from the lowest "
                f"written site, {first}, to the highest read one, {last}; use a site within these"
            )
    if type(pathway.lag) is not int or pathway.lag < 1:
        raise ConfigError(
            f"{name}'s lag is {pathway.lag!r}, but a state can only reach a later token; use 1 or "
            "more"
        )


def check_pathway(pathway: Pathway, width: int, device: torch.device, dtype: torch.dtype) -> None:
    """Hold a pathway's `update`, `scan` and `guess` to each other, values and gradients, on
    readings of random tokens.

    `width`, `device` and `dtype` are those of the residual stream that it reads.

    Raises:
        ConfigError: they differ; says in what.
    """
    if any(
        parameter.is_meta or hasattr(parameter, "full_tensor") for parameter in pathway.parameters()
    ):
        return  # offloaded or sharded: no single call of its methods has them
    name, generator = type(pathway).__name__, torch.Generator().manual_seed(1)
    tokens = max(GROUPS * pathway.lag - pathway.lag // 2, 2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    with torch.no_grad():
        _check_tokens(pathway, normal(ROWS, tokens, width))
    with torch.enable_grad():
        read = [pathway.read(site, normal(ROWS, tokens, width)) for site in sorted(pathway.reads)]
        readings = [reading.detach().requires_grad_() for reading in read]
        given = normal(ROWS, pathway.lag, pathway.state_width).to(readings[0].dtype)
        present = (torch.rand(ROWS, tokens, 1, generator=generator) > 0.3).to(
            device, readings[0].dtype
        )

        def loop(*inputs: torch.Tensor | None) -> torch.Tensor:
            return scan_by_update(pathway, readings, *inputs)

        def scan(*inputs: torch.Tensor | None) -> torch.Tensor:
            return pathway.scan(readings, *inputs)

        wanted = (ROWS, tokens, pathway.state_width)
        for what, states in (
            ("update", pathway.update(readings, None)),
            ("guess", pathway.guess(readings)),
        ):
            if states.shape != wanted:
                raise ConfigError(
                    f"{name}.{what} gives states of shape {list(states.shape)} for {ROWS} rows of "
                    f"{tokens} tokens and a state_width of {pathway.state_width}; make them "
                    f"{list(wanted)}"
                )
        _compare(
            name,
            "update gives other states for no state (None) than for zeros, which padding gets; "
            "give the same for both",
            pathway.update(readings, None),
            pathway.update(readings, read[0].new_zeros(wanted)),
        )
        for initial, gates in ((None, None), (given, present)):
            initial = None if initial is None else initial.detach().requires_grad_()
            one, other = loop(initial, gates), scan(initial, gates)
            _compare(
                name,
                f"scan gives other states than update, applied token by token{_with(initial)}; "
                "leave scan out, as the base class's is exact, or mend it",
                other,
                one,
            )
            _compare_gradients(name, pathway, one, other, readings, initial)
            received = torch.cat(
                [torch.zeros_like(given) if initial is None else initial, one], dim=1
            )[:, :tokens]
            received = received if gates is None else received * gates
            _compare(
                name,
                "update gives other states for all tokens at once than for some at a time; make "
                "each of its own reading and received state alone",
                pathway.update(readings, received),
                one,
            )
        alone = scan_by_update(
            pathway, [reading[1:] for reading in readings], given[1:], present[1:]
        )
        together = loop(given, present)[1:]
        _compare(
            name,
            "update gives a row other states beside another row than alone; keep rows apart",
            together,
            alone,
        )


def _check_tokens(pathway: Pathway, hidden: torch.Tensor) -> None:
    """Refuse a `read` or `write` in which one token's result depends on another's, and methods that
    change what they get.

    Solvers call them for other groups of tokens than the exact rollout does, and generation for one
    token at a time.
    """
    name, part = type(pathway).__name__, (slice(1, 2), slice(1, 2))
    kept, readings = hidden.clone(), []
    for site in sorted(pathway.reads):
        reading = pathway.read(site, hidden)
        if not isinstance(reading, torch.Tensor) or reading.shape[:2] != hidden.shape[:2]:
            found = (
                list(reading.shape)
                if isinstance(reading, torch.Tensor)
                else f"a {type(reading).__name__}"
            )
            raise ConfigError(
                f"{name}.read gives {found}; give one tensor [rows, tokens, ...], here {ROWS} by "
                f"{hidden.shape[1]}"
            )
        _compare_alone(f"{name}.read", pathway.read(site, hidden[part]), reading[part])
        _check_kept(f"{name}.read", "the residual stream", hidden, kept)
        readings.append(reading.clone())
    given = [reading.clone() for reading in readings]
    pathway.update(given, None)
    received = pathway.update(readings, None).clone()
    if received.shape != (*hidden.shape[:2], pathway.state_width):
        return  # what comes next says so
    before = received.clone()
    pathway.update(given, received)
    for one, other in zip(given, readings, strict=True):
        _check_kept(f"{name}.update", "its readings", one, other)
    _check_kept(f"{name}.update", "the state that it receives", received, before)
    for site in sorted(pathway.writes):
        added = pathway.write(site, hidden, received)
        if added.shape != hidden.shape or (hidden + added).dtype != hidden.dtype:
            raise ConfigError(
                f"{name}.write gives {added.dtype} of shape {list(added.shape)}, to be added to a "
                f"residual stream of {hidden.dtype} of shape {list(hidden.shape)}; give the same"
            )
        _compare_alone(
            f"{name}.write", pathway.write(site, hidden[part], received[part]), added[part]
        )
        _check_kept(f"{name}.write", "the residual stream", hidden, kept)
        _check_kept(f"{name}.write", "the state", received, before)


def _compare_alone(method: str, alone: torch.Tensor, among: torch.Tensor) -> None:
    name, _, called = method.partition(".")
    _compare(
        name,
        f"{called} gives a token something else alone than among others; make it of that token "
        "alone",
        alone,
        among,
    )


def _check_kept(method: str, what: str, now: torch.Tensor, before: torch.Tensor) -> None:
    if not torch.equal(now, before):
        raise ConfigError(f"{method} changes {what} in place; give a new tensor instead")


def _compare_gradients(
    name: str,
    pathway: Pathway,
    one: torch.Tensor,
    other: torch.Tensor,
    readings: list[torch.Tensor],
    initial: torch.Tensor | None,
) -> None:
    """Refuse a scan whose gradients, of readings, initial states or parameters, are not those of
    the loop over `update`."""
    inputs = {
        f"the readings of site {site}": each
        for site, each in zip(sorted(pathway.reads), readings, strict=True)
    }
    if initial is not None:
        inputs["the initial states"] = initial
    inputs |= {
        f"the parameter {key}": each
        for key, each in pathway.named_parameters()
        if each.requires_grad
    }
    weights = torch.randn(one.shape, generator=torch.Generator().manual_seed(2)).to(one)
    found = [
        torch.autograd.grad((weights * states).sum(), list(inputs.values()), allow_unused=True)
        if states.requires_grad
        else [None] * len(inputs)
        for states in (one, other)
    ]
    for (key, tensor), want, got in zip(inputs.items(), *found, strict=True):
        zeros = torch.zeros_like(tensor)
        _compare(
            name,
            f"scan gives {key} another gradient than update, applied token by "
            f"token{_with(initial)}; leave scan out, as the base class's is exact, or mend it",
            zeros if got is None else got,
            zeros if want is None else want,
        )


def _compare(name: str, problem: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Refuse what differs by more than rounding, which grows a little along the tokens of a
    trial."""
    what, _, mend = problem.partition("; ")
    if got.shape != want.shape:
        raise ConfigError(
            f"{name}.{what} (of shape {list(got.shape)}, not {list(want.shape)}); {mend}"
        )
    allowed = max(1e-4, 16 * torch.finfo(want.dtype).eps)
    got, want = got.detach().double(), want.detach().double()
    share = float((got - want).norm() / want.norm().clamp_min(1e-12))
    if not share <= allowed:
        raise ConfigError(f"{name}.{what} (by {share:.1g} of their size); {mend}")


def _with(initial: torch.Tensor | None) -> str:
    return "" if initial is None else ", beside initial states and padding"
