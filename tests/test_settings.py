"""Settings are held to their annotations where they are made, whatever is handed over."""

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import PositiveInt

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
)
from undertow.depth import (
    ArgmaxStability,
    DepthCache,
    FixedDepth,
    LatentDifference,
    LearnedGate,
    SampledDepth,
    Scripted,
    Steps,
)
from undertow.describe import describe
from undertow.lab.evaluation.run import evaluate
from undertow.lab.runs.recipe import load_recipe
from undertow.lab.tasks import GSM8K
from undertow.mapping import from_mapping, to_mapping
from undertow.paths import takes_paths
from undertow.pathways import Recurrence
from undertow.registry import register
from undertow.settings import AsText, settings

PAIR = ((3, 0),)
WRONG: dict[str, Callable[[], Any]] = {
    r"T2MLR\.first_layer: expected whole number, got 1\.0$": lambda: T2MLR(1.0, 2.0),
    r"T2MLR\.first_layer: expected whole number, got true": lambda: T2MLR(True, 2),
    r"T2MLR\.last_layer: expected whole number, got '2'": lambda: T2MLR(1, "2"),
    r"T2MLR\.norm: .*got 'rmss'; did you mean 'rms'\?": lambda: T2MLR(1, 2, norm="rmss"),
    r"T2MLR\.gate_gain: .*nan; give a finite one": lambda: T2MLR(1, 2, gate_gain=math.nan),
    r"T2MLR\.from_paper\.l_start: .*'1'": lambda: T2MLR.from_paper("1", 2),
    r"unknown key T2MLR\.gain; did you mean 'gate_gain'": lambda: T2MLR.from_paper(1, 2, gain=1),
    r"T2MLR takes fewer values; leave out 6": lambda: T2MLR(1, 2, "rms", False, 0.1, 6),
    r"missing T2MLR\.first_layer, T2MLR\.last_layer, which must be given": lambda: T2MLR(),
    r"T2MLR\.first_layer is given twice": lambda: T2MLR(1, 2, first_layer=1),
    r"connections\[0\]: expected \[whole number, whole number\], got 3": lambda: TurboConn([3, 1]),
    r"connections: expected \[\[.*got '31'": lambda: TurboConn("31"),
    r"connections\[0\]\[0\]: expected whole number, got 3\.0": lambda: TurboConn(((3.0, 0),)),
    r"TurboConn\.lag: expected whole number, got 1\.5": lambda: TurboConn(PAIR, lag=1.5),
    r"TurboConn\.lag: .*does not fit into 64 bits": lambda: TurboConn(PAIR, lag=2**63),
    r"TurboConn: rank is 0; use 1 or more": lambda: TurboConn(PAIR, rank=0),
    r"TurboConn: rank is 2000000; use 1,000,000 or less": lambda: TurboConn(PAIR, rank=2_000_000),
    r"TurboConn\.alpha: expected number, got 'x'": lambda: TurboConn(PAIR, alpha="x"),
    r"TurboConn\.alpha: expected number, got inf": lambda: TurboConn(PAIR, alpha=math.inf),
    r"normalize: expected true or false, got 'no'": lambda: TurboConn(PAIR, normalize="no"),
    r"wired\.min_gap: expected whole number, got 'a'": lambda: TurboConn.wired([3], [1], "a"),
    r"SoftToken\.weight: expected number, got 'a'": lambda: SoftToken("a"),
    r"SoftToken: weight is 2\.0; use 1 or less": lambda: SoftToken(2),
    r"Looped\.prelude: expected \[whole number, \.\.\.\], got 1": lambda: Looped(1, 2, 3),
    r"Looped\.core: expected \[whole number, \.\.\.\], got 'x'": lambda: Looped((), "x", ()),
    r"Looped\.norm: expected true or false, got 1": lambda: Looped((), (1,), (), norm=1),
    r"Looped\.whole: layers is 0; use 1 or more": lambda: Looped.whole(0),
    r"Scan\.sweeps: expected whole number, got 2\.5": lambda: Scan(2.5),
    r"Scan\.sweeps: expected whole number, got '2'": lambda: Scan("2"),
    r"Scan\.tolerance: expected number or null, got nan": lambda: Scan(tolerance=math.nan),
    r"Jacobi\.forward: expected whole number, got true": lambda: Jacobi(True),
    r"Chunked\.inner: expected Scan\(\.\.\.\) or .*, got 'scan'": lambda: Chunked(64, "scan"),
    r"Chunked\.inner: .*got the class Scan": lambda: Chunked(64, Scan),
    r"Chunked: chunk is 0; use 1 or more": lambda: Chunked(0),
    r"Sequential\.gradient: .*got 3": lambda: Sequential(3),
    r"Auto: tolerance is 1\.0; use more than 0, and less than 1": lambda: Auto(1),
    r"Auto: rollout_cost is 0\.5; use 1 or more": lambda: Auto(rollout_cost=0.5),
    r"LatentDifference\.threshold: expected number, got null": lambda: LatentDifference(None),
    r"LatentDifference: threshold is 0\.0; use more than 0": lambda: LatentDifference(0),
    r"LearnedGate\.quantile: expected number, got 'x'": lambda: LearnedGate("x"),
    r"ArgmaxStability: times is 100001; use 100,000 or less": lambda: ArgmaxStability(100_001),
    r"Scripted: depths holds 0; use 1 or more": lambda: Scripted((1, 0)),
    r"SampledDepth: spread is 4\.0; use 3 or less": lambda: SampledDepth(2, spread=4),
    r"FixedDepth\.depth: expected whole number, got '4'": lambda: FixedDepth("4"),
    r"without_gradient is 1.5": lambda: Steps(1.5, 2),
    r"tokens is 'x'": lambda: DepthCache(tokens="x"),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_value_is_refused_at_once(message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        WRONG[message]()
    assert "\n" not in str(caught.value)


def test_control_a_plain_dataclass_takes_anything() -> None:
    @dataclass(frozen=True)
    class Plain:
        first_layer: int

    assert Plain(1.0).first_layer == 1.0  # type: ignore[arg-type]


def test_lists_and_other_libraries_numbers_become_plain_ones() -> None:
    settings = TurboConn([[3, 0]], lag=np.int64(2), alpha=np.float32(2))
    assert settings == TurboConn(PAIR, lag=2, alpha=2.0)
    assert type(settings.lag) is int and type(settings.connections[0]) is tuple
    assert Looped(range(1), [1, 2], (3,)) == Looped((0,), (1, 2), (3,))
    assert GSM8K(train=Path("a.jsonl")) == GSM8K(train="a.jsonl")  # type: ignore[arg-type]
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


def test_they_are_plain_frozen_dataclasses_besides() -> None:
    first, second = TurboConn(PAIR, 2), Scan(3, 1)
    assert {first, TurboConn(PAIR, lag=2)} == {first}
    assert pickle.loads(pickle.dumps(second)) == copy.deepcopy(second) == second
    assert dataclasses.replace(second, sweeps=4) == Scan(4, 1) != second
    assert repr(second).startswith("Scan(sweeps=3, backward=1")
    assert [each.name for each in dataclasses.fields(SoftToken)] == ["weight"]
    with pytest.raises(ConfigError, match="Chunked: chunk is 0"):
        dataclasses.replace(Chunked(4), chunk=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        second.sweeps = 4  # type: ignore[misc]


@pytest.mark.parametrize("plain", [False, True])
def test_settings_of_ones_own_are_checked_too(plain: bool, own_kinds: None) -> None:
    class Own(Recurrence):
        kind = "own"
        layers: tuple[PositiveInt, ...]
        rank: int = 3
        words: list[str] = dataclasses.field(default_factory=list)

        def build(self, *inputs: Any) -> Any: ...

        def __post_init__(self) -> None:
            if self.rank == 13:
                raise ValueError("13 is unlucky")

    made: Any = register(dataclass(frozen=True)(Own) if plain else Own)
    own = made([1], 4)
    assert own == made(layers=(1,), rank=4) and own.words == [] and isinstance(own, Own)
    with pytest.raises(ConfigError, match=r"Own\.rank: expected whole number, got 2\.5"):
        made((1,), 2.5)
    with pytest.raises(ConfigError, match=r"Own: layers holds 0; use 1 or more"):
        made((1, 0))
    with pytest.raises(ConfigError, match=r"Own: 13 is unlucky"):
        made((1,), 13)


@dataclass(frozen=True)
class Slope(AsText):
    forms: ClassVar[str] = "flat or steep(n)"
    steps: int = 0

    @classmethod
    def from_text(cls, text: str) -> "Slope":
        if text == "flat":
            return cls()
        if not text.startswith("steep("):
            raise ConfigError(f"slope is {text!r}; write {cls.forms}")
        return cls(int(text[6:-1]))

    def to_text(self) -> str:
        return f"steep({self.steps})" if self.steps else "flat"


@settings
class Hill:
    slope: Slope = Slope(2)
    """How steep."""
    path: Slope | None = None


def test_what_is_written_as_text() -> None:
    assert Hill("steep(3)") == Hill(Slope(3)) == from_mapping(Hill, {"slope": "steep(3)"})  # type: ignore[arg-type]
    assert to_mapping(Hill(path=Slope())) == {"slope": "steep(2)", "path": "flat"}
    assert from_mapping(Hill, to_mapping(Hill(path=Slope()))) == Hill(path=Slope())
    assert describe(Hill).startswith("slope: flat or steep(n) (default: steep(2))\n")
    with pytest.raises(
        ConfigError, match=r"^hill: slope is 'up'; write flat or steep\(n\)$"
    ) as caught:
        from_mapping(Hill, {"slope": "up"}, "hill")
    assert caught.value.key == "hill.slope"
    with pytest.raises(ConfigError, match=r"^slope is 'up'; write"):
        Hill("up")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^Hill\.slope: expected flat or steep\(n\), got 3$"):
        Hill(3)  # type: ignore[arg-type]


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
