"""Configuration: read from plain data, written back, overridden, and described; every mistake
named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

import hypothesis
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from undertow.describe import WIDTH, describe, field_docs
from undertow.errors import CheckpointError, ConfigError, UndertowError, nearest
from undertow.mapping import apply_overrides, from_mapping, load_yaml, save_yaml, to_mapping
from undertow.settings import alternative, settings


@settings
class Gate:
    """A gated recurrence.

    A second paragraph, which help leaves out.
    """

    kind: ClassVar[str] = "gate"
    alternatives: ClassVar[tuple[str, ...]] = ("preset", "sized", "half")

    width: int
    """Width of the gate."""
    layers: tuple[int, ...] = (1, 2)
    """Layers that the gate spans."""

    @classmethod
    @alternative
    def preset(cls, name: Literal["small", "large"], scale: float = 1.0, **others: Any) -> Gate:
        """Take the width from a name."""
        return cls(**{"width": int({"small": 8, "large": 64}[name] * scale)} | others)

    @classmethod
    @alternative
    def sized(cls, rows: int, columns: int = 2, layers: Sequence[int] = (1, 2)) -> Gate:
        """Take the width from a table's size."""
        return cls(rows * columns, tuple(layers))

    @classmethod
    @alternative
    def half(cls, rows: int, **others: Any) -> Gate:
        """Take half the width."""
        return cls(rows // 2, **others)


@settings
class Shift:
    kind: ClassVar[str] = "shift"

    by: int = 1
    """How far to shift."""


@settings
class Named:
    name: str = "run"
    """Name of the run, which is long enough a story that its telling has to be wrapped somewhere
    before the line ends.

    And a second paragraph."""


@settings
class Optimizer(Named):
    rate: float = 1e-3
    """Learning rate."""
    schedule: Literal["cosine", "off"] = "cosine"
    """How the rate falls."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay of the two moments."""

    def __post_init__(self) -> None:
        if self.rate <= 0:
            raise ConfigError(f"rate must be positive, got {self.rate}")


@settings
class Settings:
    task: Gate | Shift
    """What to learn."""
    steps: int = 100
    """Steps to take."""
    resume: bool = False
    """Whether to go on."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """How to learn."""
    recurrence: Gate | Shift | None = None
    """The recurrence."""
    limit: int | None = None
    """The most examples."""
    spans: tuple[tuple[int, int], ...] = ()
    """Pairs of layers."""
    rates: tuple[float, ...] | None = None
    """Rates to try."""
    batch: int | Literal["auto"] = "auto"
    """Rows of a batch."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weight of each loss."""
    stages: tuple[Gate | Shift, ...] = (Shift(),)
    """Stages to run."""
    extra: Named | None = None
    """More names."""
    derived: int = field(init=False, default=3)


FULL = {
    "task": {"kind": "gate", "width": 4, "layers": [3]},
    "steps": 7,
    "resume": True,
    "optimizer": {"name": "b", "rate": 0.5, "schedule": "off", "betas": [0.1, 0.2]},
    "recurrence": {"kind": "shift", "by": 2},
    "limit": 9,
    "spans": [[1, 2], [3, 4]],
    "rates": [0.1, 2.0],
    "batch": 16,
    "weights": {"state": 0.5},
    "stages": [{"kind": "shift", "by": 5}],
    "extra": {"name": "x"},
}


def read(**changes: Any) -> Settings:
    return from_mapping(Settings, {"task": "shift"} | changes)


def message(call: Any, *arguments: Any, **keywords: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **keywords)
    return str(caught.value)


# Reading and writing


def test_reads_every_kind_of_field() -> None:
    config = from_mapping(Settings, FULL)
    assert config == Settings(
        task=Gate(width=4, layers=(3,)),
        steps=7,
        resume=True,
        optimizer=Optimizer("b", 0.5, "off", (0.1, 0.2)),
        recurrence=Shift(2),
        limit=9,
        spans=((1, 2), (3, 4)),
        rates=(0.1, 2.0),
        batch=16,
        weights={"state": 0.5},
        stages=(Shift(5),),
        extra=Named("x"),
    )
    assert to_mapping(config) == FULL


def test_omitted_keys_take_the_defaults() -> None:
    assert read() == Settings(task=Shift())
    assert read(optimizer=None, extra={}) == Settings(task=Shift(), extra=Named())


@pytest.mark.parametrize("none", [None, "none", {"kind": "none"}, {"kind": None}])
def test_none_leaves_an_optional_section_out(none: object) -> None:
    assert read(recurrence=none).recurrence is None


def test_shorthand_names_the_kind() -> None:
    assert read(recurrence="shift").recurrence == Shift()


@pytest.mark.parametrize("value", [1, 1.0, "1e0", "10.E-1", ".1e+1", "+1E0"])
def test_numbers_accepted_for_a_float(value: object) -> None:
    rate = read(optimizer={"rate": value}).optimizer.rate
    assert rate == 1.0
    assert type(rate) is float


def test_a_kind_may_be_given_for_its_own_class_alone() -> None:
    assert from_mapping(Shift, {"kind": "shift", "by": 3}) == Shift(3)
    assert (
        message(from_mapping, Shift, {"kind": "gate"}, "task")
        == "task.kind: expected 'shift', got 'gate'"
    )
    assert message(from_mapping, Named, {"kind": "gate"}) == "unknown key kind"


numbers = st.floats(allow_nan=False, allow_infinity=False)
wholes = st.integers(-(2**63), 2**63 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
gates = st.builds(Gate, width=wholes, layers=st.lists(wholes, max_size=3).map(tuple))
shifts = st.builds(Shift, by=wholes)
configs = st.builds(
    Settings,
    task=gates | shifts,
    steps=wholes,
    resume=st.booleans(),
    optimizer=st.builds(
        Optimizer,
        name=texts,
        rate=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
        schedule=st.sampled_from(["cosine", "off"]),
        betas=st.tuples(numbers, numbers),
    ),
    recurrence=st.none() | gates | shifts,
    limit=st.none() | wholes,
    spans=st.lists(st.tuples(wholes, wholes), max_size=3).map(tuple),
    rates=st.none() | st.lists(numbers, max_size=3).map(tuple),
    batch=wholes | st.just("auto"),
    weights=st.dictionaries(texts, numbers, max_size=3),
    stages=st.lists(gates | shifts, max_size=2).map(tuple),
    extra=st.none() | st.builds(Named, name=texts),
)


@hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
@given(configs)
def test_round_trip(config: Settings) -> None:
    data = to_mapping(config)
    assert from_mapping(Settings, data) == config
    text = yaml.safe_dump(data, sort_keys=False, width=WIDTH)  # as save_yaml does
    assert from_mapping(Settings, yaml.safe_load(text)) == config


# Mistakes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"step": 3}, "unknown key step; did you mean 'steps'?"),
        ({1: 3}, "unknown key 1"),
        ({"optimizer": {"raet": 1.0}}, "unknown key optimizer.raet; did you mean 'rate'?"),
        (
            {"stages": [{"kind": "shift", "bye": 1}]},
            "unknown key stages[0].bye; did you mean 'by'?",
        ),
        ({"steps": "ten"}, "steps: expected whole number, got 'ten'"),
        ({"steps": None}, "steps: expected whole number, got null"),
        ({"limit": "all"}, "limit: expected whole number or null, got 'all'"),
        ({"optimizer": {"rate": False}}, "optimizer.rate: expected number, got false"),
        ({"optimizer": {"rate": "nan"}}, "optimizer.rate: expected number, got 'nan'"),
        (
            {"optimizer": {"rate": float("nan")}},
            "optimizer.rate: expected number, got nan; give a finite one",
        ),
        ({"optimizer": {"rate": -1}}, "optimizer: rate must be positive, got -1.0"),
        ({"optimizer": {"name": 12}}, "optimizer.name: expected text, got 12; put text in quotes"),
        ({"optimizer": {"betas": [1]}}, "optimizer.betas: expected [number, number], got [1]"),
        ({"optimizer": {"betas": [1, "x"]}}, "optimizer.betas[1]: expected number, got 'x'"),
        (
            {"optimizer": {"schedule": "cosin"}},
            "optimizer.schedule: expected one of 'cosine', 'off', got 'cosin'; did you mean "
            "'cosine'?",
        ),
        (
            {"optimizer": {"schedule": False}},
            "optimizer.schedule: expected one of 'cosine', 'off', got false; put text in quotes",
        ),
        ({"optimizer": 3}, "optimizer: expected section, got 3"),
        ({"extra": "x"}, "extra: expected section or null, got 'x'"),
        ({"spans": [[1, 2], [3]]}, "spans[1]: expected [whole number, whole number], got [3]"),
        ({"rates": 1}, "rates: expected [number, ...] or null, got 1"),
        (
            {"batch": "aut"},
            "batch: expected whole number or 'auto', got 'aut'; did you mean 'auto'?",
        ),
        ({"weights": {"state": "x"}}, "weights.state: expected number, got 'x'"),
        ({"weights": {1: 1.0}}, "weights: expected text, got 1; put text in quotes"),
        (
            {"task": "shif"},
            "task.kind: expected one of gate, shift, got 'shif'; did you mean 'shift'?",
        ),
        (
            {"task": {"kind": ["shift"]}},
            "task.kind: expected one of gate, shift, got ['shift']; did you mean 'shift'?",
        ),
        ({"task": None}, "task.kind: missing; expected one of gate, shift"),
        ({"task": 3}, "task: expected section of kind gate or shift, got 3"),
        ({"task": {"kind": "shift", "by": "x"}}, "task.by: expected whole number, got 'x'"),
        ({"task": "gate"}, "missing task.width, which must be given"),
        ({"recurrence": {"by": 3}}, "recurrence.kind: missing; expected one of gate, shift, none"),
        ({"recurrence": 3}, "recurrence: expected section of kind gate or shift or null, got 3"),
        (
            {"recurrence": {"kind": "none", "by": 3}},
            "recurrence: kind none takes no other keys, got by",
        ),
        ({"derived": 4}, "unknown key derived"),
    ],
)
def test_mistake_is_named(changes: dict[Any, Any], expected: str) -> None:
    assert message(from_mapping, Settings, {"task": "shift"} | changes) == expected


def test_mistakes_at_the_top() -> None:
    assert message(from_mapping, Settings, [1]) == "expected a mapping of keys to values, got [1]"
    assert message(from_mapping, Settings, {}) == "missing task, which must be given"
    assert message(from_mapping, Optimizer, {"rate": 0}) == "rate must be positive, got 0.0"
    assert message(from_mapping, Optimizer, {"rate": 10**400}).endswith("...")
    assert (
        message(from_mapping, Optimizer, {"rat": 0}, "a.b")
        == "unknown key a.b.rat; did you mean 'rate'?"
    )


def test_nearest() -> None:
    assert nearest("stesp", ["steps", "rate"]) == "; did you mean 'steps'?"
    assert nearest("zzz", ["steps"]) == ""
    assert nearest(None, []) == ""
    assert issubclass(ConfigError, UndertowError)


# Alternative constructors


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"preset": "small"}, Gate(8)),
        ({"preset": "small", "layers": [5]}, Gate(8, (5,))),
        ({"preset": "small", "width": 3}, Gate(3)),
        ({"preset": ["large", 2]}, Gate(128)),
        ({"preset": {"name": "large", "scale": "5e-1"}}, Gate(32)),
        ({"preset": "large", "scale": 2, "kind": "gate"}, Gate(128)),
        ({"sized": 3}, Gate(6)),
        ({"sized": [3, 4]}, Gate(12)),
        ({"sized": {"rows": 3}, "columns": 5}, Gate(15)),
        ({"sized": 3, "layers": [7]}, Gate(6, (7,))),
        ({"half": 3, "layers": [7]}, Gate(1, (7,))),
    ],
)
def test_alternative_constructor(section: dict[str, Any], expected: Gate) -> None:
    assert from_mapping(Gate, section) == expected
    assert read(recurrence={"kind": "gate"} | section).recurrence == expected


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            {"preset": "smal"},
            "preset: expected one of 'small', 'large', got 'smal'; did you mean 'small'?",
        ),
        ({"preset": "small", "sized": 3}, "give only one of preset, sized"),
        ({"preset": "small", "layer": [1]}, "unknown key layer; did you mean 'layers'?"),
        ({"preset": "small", "layers": "x"}, "layers: expected [whole number, ...], got 'x'"),
        ({"preset": {"nam": "small"}}, "unknown key preset.nam; did you mean 'name'?"),
        ({"preset": {"name": "small", "scale": "x"}}, "preset.scale: expected number, got 'x'"),
        (
            {"preset": {"name": "small", "scale": 1}, "scale": 2},
            "preset: scale given twice; give it once",
        ),
        ({"preset": {}}, "missing preset.name, which must be given"),
        ({"preset": ["small", 1, 2]}, "Gate.preset takes fewer values; leave out 2"),
        ({"sized": 3, "rows": 4}, "sized is given twice; give it once"),
        ({"sized": 3, "width": 4}, "unknown key width"),
        ({"sized": 3, "layers": 7}, "layers: expected [whole number, ...], got 7"),
        ({"half": 3, "width": 4}, "width is given twice; give it once"),
        ({"presett": "small"}, "unknown key presett; did you mean 'preset'?"),
    ],
)
def test_alternative_constructor_mistakes(section: dict[str, Any], expected: str) -> None:
    assert message(from_mapping, Gate, section) == expected


# Files


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "new" / "settings.yaml"
    config = from_mapping(Settings, FULL)
    save_yaml(Settings(task=Shift()), path)
    save_yaml(config, path)
    assert from_mapping(Settings, load_yaml(path)) == config
    assert [each.name for each in path.parent.iterdir()] == ["settings.yaml"]
    assert path.read_text().startswith("task:\n  kind: gate\n")


def test_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.yaml"
    save_yaml(Shift(1), path)

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(CheckpointError, match="no space left; what was there before is untouched"):
        save_yaml(Shift(2), path)
    assert load_yaml(path) == {"kind": "shift", "by": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: c: 2\n", ", line 2: mapping values are not allowed here"),
        ("a: [1\n", ", line 2: expected ',' or ']', but got '<stream end>'"),
        ("a: 1\nb: {c: 1, c: 2}\n", ", line 2: the key 'c' is given twice"),
        ("a: 1\nb: 2\na: 3\n", ", line 3: the key 'a' is given twice"),
        (
            "a: !!python/object:os.system 1\n",
            ", line 1: could not determine a constructor for the tag",
        ),
        ("a: 2024-13-45\n", ", line 1: '2024-13-45' is no timestamp that can be read"),
        ("- 1\n", ", line 1: expected a mapping of keys to values, got [1]"),
        ("", ", line 1: expected a mapping of keys to values, got null"),
    ],
)
def test_yaml_mistakes(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    found = message(load_yaml, path)
    assert found.startswith(f"{path}{expected}")
    assert "\n" not in found


def test_repeated_keys_are_told_from_merged_ones(tmp_path: Path) -> None:
    path = tmp_path / "merge.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {<<: *b, x: 4}\n")
    assert load_yaml(path)["c"] == {"x": 4, "y": 2}


def test_unreadable_files(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"a: \xff\n")
    assert message(load_yaml, tmp_path / "no.yaml") == f"{tmp_path / 'no.yaml'}: no such file"
    assert message(load_yaml, tmp_path) == f"{tmp_path} is a folder; give the path of a YAML file"
    assert (
        message(load_yaml, path) == f"{path}, line 1: this is no UTF-8 text; save the file as UTF-8"
    )


# Overrides


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {"steps": 1, "task": {"kind": "gate", "width": 4}, "recurrence": "shift"}),
        (["--steps=2"], {"steps": 2}),
        (["--steps=2", "--steps=3"], {"steps": 3}),
        (["--limit="], {"limit": None}),
        (["--spans=[[1, 2]]"], {"spans": [[1, 2]]}),
        (["--optimizer.name=a=b"], {"optimizer": {"name": "a=b"}}),
        (["--optimizer.rate=1e-3"], {"optimizer": {"rate": "1e-3"}}),
        (["--task.width=5"], {"task": {"kind": "gate", "width": 5}}),
        (["--task.kind=gate"], {"task": {"kind": "gate", "width": 4}}),
        (["--task.kind=shift"], {"task": {"kind": "shift"}}),
        (["--task.by=2", "--task.kind=shift"], {"task": {"kind": "shift", "by": 2}}),
        (["--task=shift"], {"task": "shift"}),
        (["--task.by=2", "--task=shift"], {"task": {"kind": "shift", "by": 2}}),
        (["--recurrence.by=2"], {"recurrence": {"kind": "shift", "by": 2}}),
        (["--recurrence.kind=gate"], {"recurrence": {"kind": "gate"}}),
        (["--recurrence=none"], {"recurrence": "none"}),
        (["--new.a.b=1"], {"new": {"a": {"b": 1}}}),
        (["--empty.a=1"], {"empty": {"a": 1}}),
    ],
)
def test_overrides(arguments: list[str], expected: dict[str, Any]) -> None:
    base = {"steps": 1, "task": {"kind": "gate", "width": 4}, "recurrence": "shift"}
    before = {"steps": 1, "task": {"kind": "gate", "width": 4}, "recurrence": "shift"}
    assert apply_overrides(base, arguments) == before | expected
    assert base == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["steps=3"], "'steps=3' is not a setting; write it as --section.key=value"),
        (["-steps=3"], "'-steps=3' is not a setting; write it as --section.key=value"),
        (["--=3"], "'--=3' is not a setting; write it as --section.key=value"),
        (["--a..b=3"], "'--a..b=3' is not a setting; write it as --section.key=value"),
        (["--steps", "3"], "'--steps' has no value; write --steps=3"),
        (["--steps", "--limit=3"], "'--steps' has no value; write --steps=value"),
        (["--steps"], "'--steps' has no value; write --steps=value"),
        (["--steps.a=3"], "--steps.a: steps is 1, which has no keys"),
        (
            ["--spans=[1"],
            "'--spans=[1' does not hold a YAML value, line 1: expected ',' or ']', "
            "but got '<stream end>'; put text in quotes",
        ),
    ],
)
def test_override_mistakes(arguments: list[str], expected: str) -> None:
    assert message(apply_overrides, {"steps": 1}, arguments) == expected


# Help


def test_help_tells_every_key_with_its_doc() -> None:
    text = describe(Settings)
    words = " ".join(text.split())
    for cls, where in [
        (Settings, ""),
        (Optimizer, "optimizer."),
        (Gate, "task."),
        (Shift, "recurrence."),
    ]:
        docs = field_docs(cls)
        for each in fields(cls):
            if each.init:
                assert f"{where}{each.name}: " in text
                assert " ".join(docs[each.name].split()) in words
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "derived" not in text


@pytest.mark.parametrize(
    "line",
    [
        "task: section of kind gate or shift (required)",
        "steps: whole number (default: 100)",
        "resume: true or false (default: false)",
        "optimizer: section",
        "optimizer.name: text (default: run)",
        "optimizer.rate: number (default: 0.001)",
        "optimizer.schedule: one of 'cosine', 'off' (default: cosine)",
        "recurrence: section of kind gate or shift or null (default: null)",
        "limit: whole number or null (default: null)",
        "spans: [[whole number, whole number], ...] (default: [])",
        "weights: {text: number, ...} (default: {})",
        "stages: [section of kind gate or shift, ...] (default: (Shift(by=1),))",
        "  with task.kind=gate: A gated recurrence.",
        "    task.width: whole number (required)",
        "        Width of the gate.",
        "    task.sized: instead of the keys above; takes rows (whole number), columns (whole "
        "number,",
        "  with recurrence.kind=shift",
        "    stages[].by: whole number (default: 1)",
    ],
)
def test_help_line(line: str) -> None:
    assert line in describe(Settings).splitlines()


def test_help_tells_a_default_that_differs_from_its_class() -> None:
    @settings
    class Plain:
        by: int = 1

    @settings
    class Outer:
        shift: Shift = field(default_factory=lambda: Shift(by=4))
        named: Named = field(default_factory=lambda: Named("x"))

    assert "shift: section of kind shift (default: shift with by=4)" in describe(Outer)
    assert "named: section (default: with name=x)" in describe(Outer)
    assert describe(Plain) == "by: whole number (default: 1)\n"


def test_help_does_without_the_source() -> None:
    namespace: dict[str, Any] = {}
    exec(  # a class typed in at a prompt
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Prompt:\n    a: int = "
        "1\n",
        namespace,
    )
    assert describe(namespace["Prompt"]) == "a: whole number (default: 1)\n"
