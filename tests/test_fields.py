"""Settings are held to their annotations where they are made, whatever is handed over."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import undertow
from undertow import (
    T2MLR,
    Auto,
    Chunked,
    ConfigError,
    Jacobi,
    Looped,
    Scan,
    Sequential,
    SoftToken,
    TurboConn,
    fields,
)
from undertow.depth import (
    ArgmaxStability,
    DepthCache,
    FixedDepth,
    LatentDifference,
    LearnedGate,
    SampledDepth,
    Steps,
)
from undertow.lab.evaluation.run import evaluate
from undertow.lab.runs.recipe import load_recipe
from undertow.paths import takes_paths
from undertow.pathways import Recurrence

PAIR = ((3, 0),)
WRONG: dict[str, Callable[[], Any]] = {
    r"T2MLR's first_layer is 1.0; give a whole number": lambda: T2MLR(1.0, 2.0),
    r"T2MLR's first_layer is True": lambda: T2MLR(True, 2),
    r"T2MLR's last_layer is '2'": lambda: T2MLR(1, "2"),
    r"T2MLR's norm is 'rmss'.*did you mean 'rms'": lambda: T2MLR(1, 2, norm="rmss"),
    r"T2MLR's gate_gain is nan; give a finite number": lambda: T2MLR(1, 2, gate_gain=math.nan),
    r"l_start is '1'": lambda: T2MLR.from_paper("1", 2),
    r"connections is \[3, 1\]; give a tuple such as \(\(1, 1\),\)": lambda: TurboConn([3, 1]),
    r"connections is '31'": lambda: TurboConn("31"),
    r"connections is \(\(3.0, 0\),\)": lambda: TurboConn(((3.0, 0),)),
    r"TurboConn's lag is 1.5": lambda: TurboConn(PAIR, lag=1.5),
    r"TurboConn's alpha is 'x'": lambda: TurboConn(PAIR, alpha="x"),
    r"TurboConn's alpha is inf": lambda: TurboConn(PAIR, alpha=math.inf),
    r"TurboConn's normalize is 'no'; give True or False": lambda: TurboConn(PAIR, normalize="no"),
    r"min_gap is 'a'": lambda: TurboConn.wired([3], [1], "a"),
    r"SoftToken's weight is 'a'": lambda: SoftToken("a"),
    r"SoftToken's weight is nan": lambda: SoftToken(math.nan),
    r"prelude is 1": lambda: Looped(1, 2, 3),
    r"Looped's norm is 1": lambda: Looped((), (1,), (), norm=1),
    r"Scan's sweeps is 2.5": lambda: Scan(2.5),
    r"Scan's sweeps is '2'": lambda: Scan("2"),
    r"Scan's tolerance is nan; give a finite number or None": lambda: Scan(tolerance=math.nan),
    r"Jacobi's forward is True": lambda: Jacobi(True),
    r"Chunked's inner is 'scan'; give .* such as Scan\(\)": lambda: Chunked(64, "scan"),
    r"Chunked's inner is the class Scan": lambda: Chunked(64, Scan),
    r"Chunked's chunk is 64.0": lambda: Chunked(64.0),
    r"Sequential's gradient is 3; give text": lambda: Sequential(3),
    r"Auto's tolerance is 'x'": lambda: Auto("x"),
    r"Auto's every is 2.5": lambda: Auto(every=2.5),
    r"threshold is None": lambda: LatentDifference(None),
    r"LearnedGate's quantile is 'x'": lambda: LearnedGate("x"),
    r"times is 2.5": lambda: ArgmaxStability(2.5),
    r"SampledDepth's spread is nan": lambda: SampledDepth(2, spread=math.nan),
    r"FixedDepth's depth is '4'": lambda: FixedDepth("4"),
    r"without_gradient is 1.5": lambda: Steps(1.5, 2),
    r"tokens is 'x'": lambda: DepthCache(tokens="x"),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_value_of_another_type_is_refused_at_once(message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        WRONG[message]()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [lambda: T2MLR(1.0, 2.0), lambda: Auto(every=2.5), lambda: TurboConn(PAIR, alpha=math.nan)],
)
def test_control_without_the_check_they_are_made(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "_checked_types", lambda cls: {})
    make()


def test_lists_and_other_libraries_numbers_become_plain_ones() -> None:
    settings = TurboConn([[3, 0]], lag=np.int64(2), alpha=np.float32(2))
    assert settings == TurboConn(PAIR, lag=2, alpha=2.0)
    assert type(settings.lag) is int and type(settings.connections[0]) is tuple
    assert Looped(range(1), [1, 2], (3,)) == Looped((0,), (1, 2), (3,))
    assert T2MLR(1, 2, gate_gain=1) == T2MLR(1, 2, gate_gain=1.0)


NUMBERS = st.one_of(st.booleans(), st.integers(-3, 3), st.floats())
VALUES = st.one_of(st.none(), NUMBERS, st.text(max_size=3), st.lists(NUMBERS, max_size=2))
SETTINGS = [
    T2MLR,
    TurboConn,
    SoftToken,
    Looped,
    Scan,
    Jacobi,
    Chunked,
    Sequential,
    Auto,
    SampledDepth,
]


@given(st.sampled_from(SETTINGS), st.lists(VALUES, max_size=4))
def test_whatever_is_given_either_fits_or_is_refused_in_one_sentence(
    cls: Any, values: list[Any]
) -> None:
    try:
        cls(*values)
    except ConfigError as error:
        assert "\n" not in str(error)
    except TypeError as error:  # Python's own, for too few or too many arguments
        assert "positional argument" in str(error)


def test_recurrences_of_ones_own_are_checked_too() -> None:
    @dataclass(frozen=True)
    class Own(Recurrence):
        rank: int = 3

        def build(self, *inputs: Any) -> Any: ...

    assert Own(4).rank == 4
    with pytest.raises(ConfigError, match=r"Own's rank is 2\.5"):
        Own(2.5)  # type: ignore[arg-type]


def test_a_path_may_be_text(tmp_path: Path) -> None:
    @takes_paths
    def kinds(run: Path, other: Path | None = None, name: str = "x") -> list[Any]:
        return [run, other, name]

    assert kinds("a", "b", "c") == [Path("a"), Path("b"), "c"]
    assert kinds(Path("a")) == [Path("a"), None, "x"]
    with pytest.raises(ConfigError, match="run is None; give a path"):
        kinds(None)
    for function in (evaluate, load_recipe):
        with pytest.raises(undertow.UndertowError, match="nowhere"):
            function(str(tmp_path / "nowhere"), [])
        with pytest.raises(ConfigError, match="is 3; give a path"):
            function(3, [])
