"""T²MLR's scan: loop and kernels against the definition, on the CPU (kernels in Triton's
interpreter) and on a GPU."""

import importlib.util
import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from undertow.pathways import scan as module
from undertow.pathways.scan import NormScan, norm_scan_reference

CUDA = torch.cuda.is_available()
TRITON = importlib.util.find_spec("triton") is not None
INTERPRETER = (
    TRITON and os.environ.get("TRITON_INTERPRET") == "1"
)  # the kernels then run on CPU tensors

Scan = Callable[..., torch.Tensor]

EPSILON = 1e-6
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Case:
    """What a scan is given, and the gradient of its states."""

    readings: torch.Tensor
    initial: torch.Tensor | None
    present: torch.Tensor | None
    upstream: torch.Tensor
    clamp: float | None = None
    detach_residual: bool = False
    epsilon: float = EPSILON

    def to(self, *target: torch.device | torch.dtype | str) -> "Case":
        tensors = {
            name: value.to(*target)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, **tensors)


def case(
    batch: int,
    tokens: int,
    width: int,
    dtype: torch.dtype = torch.float64,
    initial: bool = True,
    present: str | None = "rows",
    clamp: float | None = None,
    detach_residual: bool = False,
) -> Case:
    """Readings from a hundredth of a state's size to thirty times that, so that a clamp of 5 acts
    on both sides."""
    generator = torch.Generator().manual_seed(17)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sizes = torch.tensor([0.01, 1.0, 30.0], dtype=torch.float64)[
        torch.arange(batch * tokens) % 3
    ].view(batch, tokens, 1)
    gates = None
    if present is not None:
        gates = torch.rand(
            batch if present == "rows" else 1, tokens, 1, generator=generator, dtype=torch.float64
        )
        gates = torch.where(gates < 0.3, 0.0, torch.where(gates < 0.6, gates, 1.0))
    return Case(
        normal(batch, tokens, width) * sizes,
        normal(batch, width) if initial else None,
        gates,
        normal(batch, tokens, width),
        clamp,
        detach_residual,
    ).to(dtype)


def outcome(scan: Scan, given: Case) -> list[torch.Tensor | None]:
    """The states and the gradients of readings and initial state, on the CPU and in float64."""
    readings = given.readings.detach().requires_grad_()
    initial = None if given.initial is None else given.initial.detach().requires_grad_()
    states = scan(
        readings, initial, given.present, given.clamp, given.detach_residual, given.epsilon
    )
    states.backward(given.upstream)
    results = [states.detach(), readings.grad, None if initial is None else initial.grad]
    assert all(result is None or result.dtype == given.readings.dtype for result in results)
    return [None if result is None else result.cpu().double() for result in results]


def errors(scan: Scan, given: Case, truth: Case | None = None) -> list[float]:
    """The relative errors of states, readings' gradient and initial state's against the definition
    in float64."""
    expected = outcome(
        norm_scan_reference, (given if truth is None else truth).to("cpu", torch.float64)
    )
    found = outcome(scan, given)
    relative = []
    for right, ours in zip(expected, found, strict=True):
        assert (right is None) == (ours is None)
        if right is not None and ours is not None:
            assert ours.isfinite().all()
            relative.append(
                ((ours - right).abs().max() / right.abs().max().clamp_min(1e-30)).item()
            )
    return relative


@pytest.fixture(
    params=[
        "loop",
        pytest.param(
            "interpreter",
            marks=pytest.mark.skipif(not INTERPRETER, reason="see test_the_kernels_on_the_cpu"),
        ),
        pytest.param(
            "loop on cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="no GPU")]
        ),
        pytest.param(
            "kernels on cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not (CUDA and TRITON), reason="no GPU or Triton"),
            ],
        ),
    ]
)
def scan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Scan:
    """`NormScan` in one implementation, on the device it is for."""
    if request.param == "kernels on cuda":
        assert module.uses_triton(torch.zeros((), device="cuda"))
    else:
        monkeypatch.setattr(module, "uses_triton", lambda tensor: request.param == "interpreter")
    device = "cuda" if "cuda" in request.param else "cpu"

    def run(*arguments: object) -> torch.Tensor:
        moved = [
            value.to(device) if isinstance(value, torch.Tensor) else value for value in arguments
        ]
        states: torch.Tensor = NormScan.apply(*moved)
        return states.cpu()

    return run


# --- against the definition


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("detach_residual", [False, True])
@pytest.mark.parametrize("clamp", [None, 5.0])
@pytest.mark.parametrize("present", [None, "rows", "shared"])
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 5), (3, 7, 33)])
def test_states_and_gradients_are_those_of_the_definition(
    scan: Scan,
    shape: tuple[int, int, int],
    initial: bool,
    present: str | None,
    clamp: float | None,
    detach_residual: bool,
    dtype: torch.dtype,
) -> None:
    given = case(*shape, dtype, initial, present, clamp, detach_residual)
    assert max(errors(scan, given)) < TOLERANCES[dtype]


@pytest.mark.parametrize("shape", [(2, 3, 8192), (1, 2, 5000), (2, 100, 16)])
def test_wide_states_and_long_sequences(scan: Scan, shape: tuple[int, int, int]) -> None:
    assert max(errors(scan, case(*shape))) < 1e-12


@pytest.mark.parametrize("clamp", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_accumulated_in_single(
    scan: Scan, dtype: torch.dtype, clamp: float | None
) -> None:
    given = case(2, 40, 24, dtype, clamp=clamp)
    assert max(errors(scan, given)) < TOLERANCES[dtype]
    large = replace(
        given, readings=given.readings * 500
    )  # their squares lie far above float16's 65,504
    assert max(errors(scan, large)[:1]) < TOLERANCES[dtype]


def test_memory_layouts(scan: Scan) -> None:
    given = case(3, 7, 10)
    assert given.initial is not None and given.present is not None
    plain = outcome(scan, given)
    strided = replace(
        given,
        readings=given.readings.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        initial=given.initial.t().contiguous().t(),
        present=given.present.transpose(0, 1).contiguous().transpose(0, 1),
        upstream=given.upstream.repeat_interleave(2, dim=-1)[..., ::2],
    )
    assert not any(
        value.is_contiguous() for value in vars(strided).values() if isinstance(value, torch.Tensor)
    )
    for one, other in zip(plain, outcome(scan, strided), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
    expanded = replace(
        given, upstream=torch.ones(1, 1, 1, dtype=torch.float64).expand(3, 7, 10)
    )  # the gradient of a sum
    assert max(errors(scan, expanded)) < 1e-12


@pytest.mark.parametrize("clamp", [None, 5.0])
def test_a_reading_of_zero_stays_finite(scan: Scan, clamp: float | None) -> None:
    given = case(2, 4, 6, present=None, clamp=clamp, initial=False)
    readings = given.readings.clone()
    readings[:, 0] = 0
    assert max(errors(scan, replace(given, readings=readings))) < 1e-12


def test_nan_spreads_over_its_token(scan: Scan) -> None:
    for clamp in (None, 5.0):
        given = case(2, 4, 6, present=None, clamp=clamp)
        readings = given.readings.clone()
        readings[0, 1, 3] = torch.nan
        states = scan(readings, given.initial, None, clamp, False, EPSILON)
        assert states[0, 1:].isnan().all()
        assert states[0, 0].isfinite().all() and states[1].isfinite().all()


def test_gradients_are_the_slopes_of_the_states(scan: Scan) -> None:
    given = case(2, 4, 3)
    assert given.initial is not None
    inputs = (given.readings.requires_grad_(), given.initial.requires_grad_())
    assert torch.autograd.gradcheck(
        lambda y, r: scan(y, r, given.present, None, False, EPSILON), inputs
    )


# --- the check sees mistakes


@pytest.mark.parametrize(
    ("mistake", "wrong"),
    [
        ("gate", (True, True, True)),
        ("no gates", (True, True, True)),
        ("carried gradient", (False, True, True)),
        ("gradient of the norm", (True, True, True)),
        ("epsilon", (True, True, True)),
        ("initial", (True, True, True)),
        ("order", (True, True, True)),
    ],
)
def test_the_check_finds_a_mistake(scan: Scan, mistake: str, wrong: tuple[bool, ...]) -> None:
    truth = case(3, 7, 33)
    assert truth.present is not None and truth.initial is not None
    flipped = truth.present.clone()
    flipped[0, 2] = 1 - flipped[0, 2].round()
    given = {
        "gate": replace(truth, present=flipped),
        "no gates": replace(truth, present=None),
        "carried gradient": replace(truth, detach_residual=True),
        "gradient of the norm": replace(truth, clamp=5.0),
        "epsilon": replace(truth, epsilon=2 * EPSILON),
        "initial": replace(truth, initial=truth.initial.roll(1, 0)),
        "order": replace(truth, readings=truth.readings.flip(1)),
    }[mistake]
    if mistake == "carried gradient":  # no gradient for the initial state either
        expected, found = outcome(norm_scan_reference, truth), outcome(scan, given)
        assert found[2] is None
        states, gradient = (
            a - b
            for a, b in zip(expected[:2], found[:2], strict=True)
            if a is not None and b is not None
        )
        assert states.abs().max() < 1e-12 and gradient.abs().max() > 1e-3
        return
    assert tuple(error > 1e-9 for error in errors(scan, given, truth)) == wrong


# --- around it


def test_autocast_leaves_both_passes_alone(scan: Scan) -> None:
    given = case(2, 5, 16, torch.float32)
    with torch.autocast("cuda" if CUDA else "cpu", torch.bfloat16):
        assert max(errors(scan, given)) < TOLERANCES[torch.float32]


def test_states_found_without_a_graph_can_enter_one(scan: Scan) -> None:
    given = case(2, 5, 16)
    with torch.no_grad():
        states = scan(given.readings, given.initial, given.present, None, False, EPSILON)
    weight = torch.ones(16, dtype=torch.float64, requires_grad=True)
    (states * weight).sum().backward()
    torch.testing.assert_close(weight.grad, states.sum((0, 1)))


def test_the_readings_are_left_as_they_were(scan: Scan) -> None:
    given = case(2, 5, 16)
    before = given.readings.clone(), given.upstream.clone()
    outcome(scan, given)
    assert torch.equal(given.readings, before[0]) and torch.equal(given.upstream, before[1])


def test_changing_states_that_the_backward_pass_needs_is_noticed() -> None:
    given = case(2, 5, 16)
    states = NormScan.apply(given.readings.requires_grad_(), None, None, None, False, EPSILON)
    with torch.no_grad():
        states.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        states.sum().backward()


# --- which implementation runs


def on_cuda() -> torch.Tensor:
    tensor: torch.Tensor = types.SimpleNamespace(is_cuda=True)  # type: ignore[assignment]
    return tensor


@pytest.fixture
def forget() -> object:
    module._triton_works.cache_clear()
    yield
    module._triton_works.cache_clear()


def fake_triton(start: Callable[[], object]) -> object:
    active = types.SimpleNamespace(get_current_target=start)
    return types.SimpleNamespace(
        runtime=types.SimpleNamespace(driver=types.SimpleNamespace(active=active))
    )


def test_kernels_run_on_cuda_where_triton_works(
    monkeypatch: pytest.MonkeyPatch, forget: None
) -> None:
    monkeypatch.setitem(sys.modules, "triton", fake_triton(lambda: "a target"))
    assert module.uses_triton(on_cuda())
    assert not module.uses_triton(torch.zeros(1))


def test_the_loop_runs_on_cuda_without_triton(
    monkeypatch: pytest.MonkeyPatch, forget: None
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not module.uses_triton(on_cuda())


def test_the_loop_runs_where_triton_does_not_start_and_says_so(
    monkeypatch: pytest.MonkeyPatch, forget: None
) -> None:
    def start() -> object:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setitem(sys.modules, "triton", fake_triton(start))
    with pytest.warns(UserWarning, match="does not start.*slower loop: Failed to find C compiler"):
        assert not module.uses_triton(on_cuda())


COMPILE = textwrap.dedent(
    """
    import sys
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from undertow.pathways.scan_triton import backward_kernel, forward_kernel

    def build(kernel, kind, exact, **constants):
        exactly = ("scales", "gates")
        pointers = {name: "*" + (exact if name in exactly else kind) for name in kernel.arg_names}
        sizes = {"tokens": "i32", "width": "i32"}
        signature = pointers | sizes | dict.fromkeys(constants, "constexpr")
        source = ASTSource(kernel, signature, constants)
        assert triton.compile(source, GPUTarget("cuda", 80, 32), {"num_warps": 4}).asm["ptx"]

    for kind, exact in (("bf16", "fp32"), ("fp64", "fp64")):
        build(forward_kernel, kind, exact, CLAMP=5.0, EPSILON=1e-6, BLOCK=256)
        nothing = dict(initial=None, gates=None, CLAMP=None)
        build(forward_kernel, kind, exact, **nothing, EPSILON=1e-6, BLOCK=256)
        build(backward_kernel, kind, exact, THROUGH_NORM=True, THROUGH_RESIDUAL=True, BLOCK=256)
        through = dict(THROUGH_NORM=False, THROUGH_RESIDUAL=False)
        build(backward_kernel, kind, exact, gates=None, **through, BLOCK=256)
    """
)


@pytest.mark.slow
@pytest.mark.skipif(not TRITON or INTERPRETER, reason="no Triton, or already in its interpreter")
def test_the_kernels_on_the_cpu() -> None:
    """Triton decides when it is imported, which other tests may have done, so its interpreter gets
    its own process."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        __file__,
        "-q",
        "-k",
        "interpreter",
        "-p",
        "no:cacheprovider",
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "skipped" not in result.stdout, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.skipif(not TRITON, reason="no Triton")
def test_the_kernels_compile_without_a_gpu(tmp_path: object) -> None:
    """The interpreter is Python and accepts what the compiler refuses."""
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
