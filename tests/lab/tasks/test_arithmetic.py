"""Arithmetic answers against Python's own reading of the text, by a walk over its syntax tree."""

import ast
import operator
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.lab.tasks import MultiStepArithmetic

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def expression_of(prompt: str) -> str:
    line = prompt.split("\n")[1].removeprefix("Input: ") if "\n" in prompt else prompt
    assert line.endswith("=")
    return line[:-1].strip()


def value_of(text: str) -> int:
    def walk(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(digit)) if 0 <= digit <= 9:
                return digit
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -walk(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return OPERATORS[type(op)](walk(left), walk(right))
        raise AssertionError(f"unexpected {ast.dump(node)}")

    return walk(ast.parse(text, mode="eval").body)


def test_the_checker_reads_the_papers_example():
    """Appendix A.4.2: -152 is 8 modulo 10, as Python rounds down."""
    assert value_of("(-(3 + -(1)) * 4 * (8 + 2 + 9))") == -152
    assert -152 % 10 == 8


@given(st.integers(0, 10**6), st.integers(1, 60), st.sampled_from(["paper", "bare"]))
@settings(max_examples=100, deadline=None)
def test_answers_are_right(index, operands, template):
    example = MultiStepArithmetic(template=template).example("train", index, operands)
    text = expression_of(example.prompt)
    assert str(value_of(text) % 10) == example.completion.strip()
    assert sum(map(str.isdigit, text)) == operands
    assert text.startswith("(") and text.endswith(")")


def test_layout_is_the_papers():
    example = MultiStepArithmetic().example("train", 0)
    assert example.prompt.startswith("Question: Evaluate this expression modulo 10.\nInput: (")
    assert example.prompt.endswith(") =\nAnswer:")
    assert example.completion[0] == " " and example.completion[1:].isdigit()
    bare = MultiStepArithmetic(template="bare").example("train", 0)
    assert " " not in bare.prompt and bare.prompt.endswith(")=") and len(bare.completion) == 1


def test_both_forms_of_the_papers_example_occur():
    prompts = [MultiStepArithmetic().example("train", i, 3).prompt for i in range(300)]
    assert any(" + 2 + " in p for p in prompts)  # a chain needs no inner parentheses
    assert any("-(1)" in p for p in prompts)  # a negated digit has its own


def test_distribution():
    """Operand counts, operators and unary minus are as documented, and so is the share of zeros."""
    examples = [MultiStepArithmetic().example("train", i) for i in range(3_000)]
    lengths = Counter(e.length for e in examples)
    assert set(lengths) == set(range(1, 31)) and all(60 < count < 145 for count in lengths.values())
    nodes = Counter(
        type(n) for e in examples for n in ast.walk(ast.parse(expression_of(e.prompt), mode="eval"))
    )
    operators = sum(nodes[kind] for kind in OPERATORS)
    for kind in OPERATORS:
        assert nodes[kind] / operators == pytest.approx(1 / 3, abs=0.01)
    assert nodes[ast.USub] / (nodes[ast.Constant] + operators) == pytest.approx(0.15, abs=0.01)
    assert sum(e.completion == " 0" for e in examples) / 3_000 == pytest.approx(0.2, abs=0.03)
