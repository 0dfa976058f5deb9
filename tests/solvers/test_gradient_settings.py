"""Gradients as objects and as text, and what a solver refuses of them."""

import pytest

from undertow import Adjoint, Full, Jacobi, Scan, Sequential, Truncated
from undertow.errors import ConfigError
from undertow.mapping import from_mapping, to_mapping
from undertow.solvers import Gradient, Solver

TEXTS = {
    "full": Full(),
    "truncated(3)": Truncated(3),
    "adjoint(2)": Adjoint(products=2),
    "adjoint(0.1)": Adjoint(tolerance=0.1),
    "adjoint(4, 0.1)": Adjoint(4, 0.1),
}


@pytest.mark.parametrize(("text", "gradient"), TEXTS.items())
def test_text_and_object_are_the_same(text, gradient):
    assert Gradient.from_text(text) == gradient and gradient.to_text() == text
    solver = Scan(4, gradient=gradient)
    assert solver == Scan(4, gradient=text)
    assert to_mapping(solver)["gradient"] == text
    assert from_mapping(Solver, to_mapping(solver)) == solver


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Scan(4, gradient=Truncated(99)), "scan has 4 sweeps, but .* go back through 99"),
        (lambda: Scan(4, gradient="truncated(99)"), "use a number from 0 to 4"),
        (lambda: Scan(3, 5), "scan has 3 sweeps, but backward=5"),
        (lambda: Jacobi(8, 2, gradient=Full()), "jacobi has backward=2, but .* leave out one"),
        (lambda: Scan(4, 3, gradient=Adjoint(1)), "goes back through 0 of its 4 sweeps"),
        (lambda: Sequential(Truncated(0)), "at least 1"),
        (lambda: Adjoint(), "neither products nor a tolerance"),
        (lambda: Adjoint(tolerance=2.0), "tolerance is 2"),
        (lambda: Truncated(-1), "steps is -1"),
    ],
)
def test_what_contradicts_itself_is_refused(make, told):
    with pytest.raises(ConfigError, match=told):
        make()


def test_a_solver_says_how_often_it_runs_the_block():
    assert Scan(4, gradient=Truncated(3)).passes() == (5, 4)
    assert Scan(4, gradient=Adjoint(1)).passes() == (5, 1)
    assert Scan(4, gradient=Full()).passes() == (5, 5)


def test_both_ways_may_stand_beside_each_other_if_they_agree():
    assert Scan(4, 0, gradient=Adjoint(1)).passes() == Scan(4, gradient=Adjoint(1)).passes()
    assert Scan(4, 3, gradient=Truncated(3)).passes() == (5, 4)
