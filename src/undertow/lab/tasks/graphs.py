"""The graphs of ProsQA: drawn as the released questions were, as far as their statistics tell, and
read from them."""

from __future__ import annotations

import math
import random
import string
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

LETTERS = string.ascii_lowercase + string.ascii_uppercase
_PEOPLE = "Alex Bob Carol Davis Eva Fae Gabriel Jack Max Oliver Polly Rex Sally Sam Stella Tom Wren"
_STEMS = (
    "bom boom brim chor dum fel fom ger gor grim gwom hil im jel jom ker lem lor num quim rem rom "
    "ror scrom shum ster stor ter tim tum vum wor wum yer yim yum zhor zum"
)
NAMES, KINDS = tuple(_PEOPLE.split()), tuple(f"{stem}pus" for stem in _STEMS.split())

_NODES = 28
_MEAN_PARENTS = 1.5
_SHORTEST = 3
# Which nodes a new one's parents are drawn from: those that only the first root reaches, only the
# second, or all.
_ONLY_FIRST, _ONLY_SECOND = 0.35, 0.455


@dataclass(frozen=True)
class Question:
    """One question about a graph whose edges (a, b) say that a is a b. Nodes 0 and 1 are the roots.

    Attributes:
        symbols: the name of each node.
        path: the nodes from behind the root to the target.
        target, other: the right answer and the wrong one.
    """

    text: str
    answer: str
    steps: tuple[str, ...]
    symbols: tuple[str, ...]
    edges: tuple[tuple[int, int], ...]
    root: int
    target: int
    other: int
    path: tuple[int, ...]


def draw_question(generator: random.Random) -> Question:
    """Draw graphs until one has a question of at least three steps, and put it in words.

    The target is a leaf that only one root reaches, as far from it as any such leaf of either root;
    the wrong answer is any leaf that only the other root reaches.
    """
    while True:
        nodes, edges = _draw_graph(generator)
        distances = [distances_from(edges, root) for root in (0, 1)]
        inner = {a for a, _ in edges}
        leaves = [
            [n for n in distances[r] if n > 1 and n not in inner and n not in distances[1 - r]]
            for r in (0, 1)
        ]
        if not all(leaves):
            continue
        farthest = [max(distances[r][n] for n in leaves[r]) for r in (0, 1)]
        if max(farthest) < _SHORTEST:
            continue
        root = generator.choice([r for r in (0, 1) if farthest[r] == max(farthest)])
        target = generator.choice([n for n in leaves[root] if distances[root][n] == farthest[root]])
        return _worded(generator, nodes, edges, root, target, generator.choice(leaves[1 - root]))


def distances_from(edges: Sequence[tuple[int, int]], root: int) -> dict[int, int]:
    """The number of edges from the root to each node that it reaches, itself included."""
    children = defaultdict(list)
    for a, b in edges:
        children[a].append(b)
    distances, waiting = {root: 0}, deque([root])
    while waiting:
        node = waiting.popleft()
        for child in children[node]:
            if child not in distances:
                distances[child] = distances[node] + 1
                waiting.append(child)
    return distances


def question_from_row(row: Any) -> Question:
    """Read one released question. Raises ValueError if it lacks something or its graph does not
    bear out its answer."""
    try:
        texts = [str(row[key]) for key in ("question", "answer")]
        steps, symbols = (tuple(map(str, row[key])) for key in ("steps", "idx_to_symbol"))
        edges = tuple((int(a), int(b)) for a, b in row["edges"])
        root, target, other = (int(row[key]) for key in ("root", "target", "neg_target"))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "expected question, answer, steps, idx_to_symbol, edges, root, target and neg_target "
            f"({error})"
        ) from error
    count = len(symbols)
    if any(
        not 0 <= node < count
        for node in (root, target, other, *(node for edge in edges for node in edge))
    ):
        raise ValueError(f"a node lies outside the {count} symbols")
    if count > len(LETTERS):
        raise ValueError(f"it has {count} nodes, more than {len(LETTERS)}")
    reached = distances_from(edges, root)
    if target not in reached or other in reached:
        raise ValueError("the graph leads to the wrong answer, or not to the right one")
    number = {symbol: node for node, symbol in enumerate(symbols)}
    path = tuple(number.get(step.rstrip(".").rpartition(" ")[2], -1) for step in steps)
    if (
        not path
        or any(edge not in set(edges) for edge in zip((root, *path), path, strict=False))
        or path[-1] != target
    ):
        raise ValueError("the steps do not lead from the root to the target")
    return Question(texts[0], texts[1], steps, symbols, edges, root, target, other, path)


def _draw_graph(generator: random.Random) -> tuple[int, tuple[tuple[int, int], ...]]:
    """28 nodes, of which those that nothing leads to or from are left out: their number, and the
    edges (older, newer).

    A node has a Poisson number of parents, of mean 1.5, preferring those far from a root. One
    without parents counts for neither root. Found by comparison with the released files: see the
    test of the statistics.
    """
    first = [0]
    second = [1]
    everything = [0, 1]
    reached_by, depth = {0: 1, 1: 2}, {0: 0, 1: 0}
    edges = []
    for node in range(2, _NODES):
        share = generator.random()
        pool = list(
            first
            if share < _ONLY_FIRST
            else second
            if share < _ONLY_FIRST + _ONLY_SECOND
            else everything
        )
        parents = []
        for _ in range(min(_poisson(generator), len(pool))):
            parents.append(generator.choices(pool, [1.5 * depth[each] + 1 for each in pool])[0])
            pool.remove(parents[-1])
        edges += [(parent, node) for parent in parents]
        reached_by[node] = 0
        for parent in parents:
            reached_by[node] |= reached_by[parent]
        depth[node] = 1 + min(depth[parent] for parent in parents) if parents else 0
        everything.append(node)
        if reached_by[node] in (1, 2):
            (first if reached_by[node] == 1 else second).append(node)
    kept = {
        node: i for i, node in enumerate(sorted({0, 1} | {node for edge in edges for node in edge}))
    }
    return len(kept), tuple((kept[a], kept[b]) for a, b in edges)


def _poisson(generator: random.Random) -> int:
    floor = math.exp(-_MEAN_PARENTS)
    count = 0
    product = generator.random()
    while product > floor:
        count, product = count + 1, product * generator.random()
    return count


def _worded(
    generator: random.Random,
    nodes: int,
    edges: tuple[tuple[int, int], ...],
    root: int,
    target: int,
    other: int,
) -> Question:
    """Name the nodes, people where nothing leads to a node, and write sentences and question."""
    named = {b for _, b in edges}
    people, kinds = generator.sample(NAMES, k=len(NAMES)), generator.sample(KINDS, k=nodes)
    symbols = tuple(kinds[node] if node in named else people.pop() for node in range(nodes))

    def sentence(edge: tuple[int, int]) -> str:
        who = symbols[edge[0]]
        return f"{f'Every {who}' if edge[0] in named else who} is a {symbols[edge[1]]}."

    distances, path = distances_from(edges, root), [target]
    while path[0] != root:
        path.insert(
            0,
            generator.choice(
                [a for a, b in edges if b == path[0] and distances.get(a) == distances[b] - 1]
            ),
        )
    options = generator.sample([symbols[target], symbols[other]], k=2)
    sentences = [sentence(edge) for edge in generator.sample(edges, k=len(edges))]
    return Question(
        text=f"{' '.join(sentences)} Is {symbols[root]} a {options[0]} or {options[1]}?",
        answer=f"{symbols[root]} is a {symbols[target]}.",
        steps=tuple(sentence(edge) for edge in pairwise(path)),
        symbols=symbols,
        edges=edges,
        root=root,
        target=target,
        other=other,
        path=tuple(path[1:]),
    )
