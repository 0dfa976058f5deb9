"""A recipe: one experiment as a frozen dataclass, read from YAML. Its field docs are the command
line's help."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from undertow.config import convert, load_config
from undertow.errors import ConfigError
from undertow.lab.runs.depth import DepthSection
from undertow.lab.tasks import Task
from undertow.paths import takes_paths
from undertow.pathways import Recurrence
from undertow.plugins import full_name, load_plugins
from undertow.reading import shown
from undertow.solvers import Auto, Solver

LONGEST_NAME = 200
"""Bytes of a name: file systems take 255, of which some are for temporary names."""
MOST_LAYERS = 10_000
MOST_ROWS = 2**20
"""The most examples of a batch."""


@dataclass(frozen=True)
class ModelSection:
    """The model: loaded from a folder or a hub name, or built from scratch in any shape."""

    path: str | None = None
    """Folder or hub name of a pretrained model and its tokenizer; without it, a model is built from
    the keys below."""
    architecture: str = "llama"
    """A transformers model type, such as llama, qwen3 or gpt2; or lstm, which has no heads and
    takes no recurrence."""
    layers: int = 2
    """Number of decoder layers."""
    width: int = 64
    """Hidden size."""
    heads: int = 4
    """Attention heads."""
    head_width: int | None = None
    """Width of an attention head; the hidden size over the heads if left out."""
    key_value_heads: int | None = None
    """Key-value heads, for grouped-query attention; as many as there are heads if left out."""
    feed_forward: int | None = None
    """Width of the feed-forward layers; 8/3 of the hidden size, rounded to a multiple of 8, if left
    out."""
    positions: int = 2048
    """Longest sequence that the model is made for."""
    initializer_range: float | None = None
    """Standard deviation of the initial weight matrices; width ** -0.5 if left out, which suits
    small models."""
    embedding_range: float = 1.0
    """Standard deviation of the initial token embeddings. At 1 small models learn to track a state
    in a fraction of the steps that they need at a matrix's scale."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer of a model built from scratch; one token a character if
    left out."""
    vocabulary: int | None = None
    """Rows of the token embeddings, if they shall be more than the tokenizer's tokens."""
    tied: bool = False
    """Use the token embeddings as the head too; they then want an embedding_range of about 0.02."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Further settings of the architecture's config, by its own names: `no_rope_layers: [0, 0]` of
    smollm3 makes two layers without positions."""
    pauses: int = 0
    """Pause tokens that the model reads after each token before it predicts; 1 is the T²MLR paper's
    2x baseline."""

    def __post_init__(self) -> None:
        at_least(
            1, self, "layers", "width", "heads", "key_value_heads", "feed_forward", "positions"
        )
        at_least(1, self, "head_width", "vocabulary")
        at_least(0, self, "pauses", "initializer_range", "embedding_range")
        at_most(MOST_LAYERS, self, "layers", "pauses")
        at_most(2**24, self, "width", "heads", "key_value_heads", "feed_forward", "head_width")
        at_most(2**31 - 1, self, "positions", "vocabulary")
        if self.head_width is None and self.width % self.heads:
            raise ConfigError(
                f"width {self.width} is no multiple of heads {self.heads}; make it one"
            )
        if self.heads % (self.key_value_heads or self.heads):
            raise ConfigError(
                f"heads {self.heads} is no multiple of key_value_heads {self.key_value_heads}; "
                "make it one"
            )
        if self.path is not None:
            self.refuse_changed(
                "path", "a pretrained model has its own; remove it, or path to build a model"
            )

    def refuse_changed(self, allowed: str, why: str) -> None:
        """Refuse a key that is not at its default and not among the allowed ones, as nothing would
        read it.

        Raises:
            ConfigError: there is such a key.
        """
        for key in fields(self):
            value = getattr(self, key.name)
            default = key.default if key.default_factory is MISSING else key.default_factory()
            if key.name not in allowed.split() and value != default:
                raise ConfigError(f"model.{key.name} is {value}, but {why}")


@dataclass(frozen=True)
class LoRASection:
    """Low-rank adapters on the base model; the recurrence is always trained whole."""

    rank: int = 16
    """Rank of the adapters."""
    alpha: int | None = None
    """Scale of the adapters' output over their rank; as large as the rank if left out."""
    dropout: float = 0.0
    """Dropout on the adapters' input."""
    targets: tuple[str, ...] | None = None
    """Names of the adapted linear layers; all of them but the head if left out."""
    save: Literal["merged", "adapter"] = "merged"
    """What a run leaves behind: a whole model with the adapters merged into it, or a small folder
    with adapters and recurrence, which PEFT loads on the base model."""

    def __post_init__(self) -> None:
        at_least(1, self, "rank", "alpha")
        at_most(2**24, self, "rank")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}; use 0 or more, and less than 1")


@dataclass(frozen=True)
class TrainingSection:
    """Optimisation by transformers.Trainer with AdamW."""

    steps: int = 1000
    """Optimiser steps."""
    epochs: int | None = None
    """Passes over the training examples; if it is set, steps follow from it."""
    examples: int | None = None
    """Train on the first so many examples of the split, again and again; if left out on all of a
    data set, and on a generated task's without end."""
    batch: int = 64
    """Examples a forward pass."""
    accumulate: int = 1
    """Forward passes whose gradients make one step."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    schedule: Literal["constant_with_warmup", "linear", "cosine", "cosine_restarts"] = (
        "constant_with_warmup"
    )
    """How the learning rate goes on after the warm-up. cosine_restarts, TurboConn's, begins anew
    every so many steps, with the warm-up."""
    warmup_steps: int = 100
    """Steps over which the learning rate rises from zero."""
    floor: float = 0.0
    """Share of the peak learning rate that a cosine schedule ends at; the T²MLR paper's code takes
    0.001 to pretrain and 0.01 to fine-tune."""
    restart_every: int = 1000
    """Steps from one start of cosine_restarts to the next."""
    gate_multiplier: float = 1.0
    """How much faster T²MLR's two gammas learn than the rest. They start at zero and open the
    recurrence, so small models learn much sooner with 10 to 30; the paper's code takes 100 for
    GSM8K."""
    weight_decay: float = 0.01
    """AdamW's weight decay; norms and biases have none."""
    beta2: float = 0.95
    """AdamW's second beta."""
    clip: float = 1.0
    """Largest norm of the gradient; a larger one is scaled down to it."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Arithmetic of matrix products in training: fp32; tf32, which GPUs since Ampere have; or bf16
    by autocast. Weights and optimiser stay in fp32, and with bf16 what is evaluated after training.
    Most CPUs are many times slower in bf16."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass, to save memory."""
    bucket_by_length: bool = True
    """Make batches of examples of similar length, so that little is spent on padding."""
    max_tokens: int | None = None
    """Longest example in tokens; longer ones are left out, counted and reported."""
    log_every: int = 10
    """Steps between two lines of the log."""
    evaluate_every: int | None = None
    """Steps between two losses on held-out examples; only one at the end if left out."""
    evaluate_examples: int = 256
    """Held-out examples for that loss; 0 for none."""
    save_every: int | Literal["auto"] | None = "auto"
    """Steps between two checkpoints to resume from. auto: one every ten minutes, or less often
    where saving takes long; null: none. Whatever it is, SIGINT and SIGTERM save one."""
    compare_every: int = 100
    """Steps between two comparisons of a solver that is not exact with the rollout; the log has
    what they find."""
    threads: int | None = None
    """CPU threads of the training process; the machine's default if left out."""
    report_to: Literal["tensorboard", "wandb", "trackio"] | None = None
    """Where the log goes besides the run's folder, by the tracker's own package; nowhere if left
    out."""

    def __post_init__(self) -> None:
        at_least(
            1,
            self,
            "steps",
            "epochs",
            "examples",
            "batch",
            "accumulate",
            "max_tokens",
            "restart_every",
        )
        at_least(1, self, "log_every", "evaluate_every", "compare_every", "threads")
        if self.save_every != "auto":
            at_least(1, self, "save_every")
        at_least(
            0, self, "warmup_steps", "weight_decay", "clip", "evaluate_examples", "gate_multiplier"
        )
        at_most(2**31 - 1, self, "steps", "epochs", "examples", "warmup_steps", "restart_every")
        at_most(MOST_ROWS, self, "batch", "accumulate")
        at_most(1024, self, "threads")
        for key in ("learning_rate", "gate_multiplier", "weight_decay", "beta2", "clip", "floor"):
            if not math.isfinite(getattr(self, key)):
                mend = "; use 0 for none" if key == "clip" else "; use a number"
                raise ConfigError(f"{key} is {getattr(self, key)}{mend}")
        if self.learning_rate <= 0:
            raise ConfigError(f"learning_rate is {self.learning_rate}; use more than 0")
        if not 0 <= self.beta2 < 1:
            raise ConfigError(f"beta2 is {self.beta2}; use 0 or more, and less than 1")
        if not 0 <= self.floor < 1:
            raise ConfigError(f"floor is {self.floor}; use 0 or more, and less than 1")
        if self.floor and self.schedule != "cosine":
            raise ConfigError(
                f"floor is {self.floor}, but schedule is {self.schedule}, and only cosine has one; "
                "leave it out"
            )
        if self.schedule == "cosine_restarts" and self.restart_every <= self.warmup_steps:
            raise ConfigError(
                f"restart_every is {self.restart_every}, but the warm-up takes {self.warmup_steps} "
                "steps; make it longer"
            )


@dataclass(frozen=True)
class EvaluationSection:
    """Accuracy by length, or the loss a token of text."""

    lengths: tuple[int, ...] = ()
    """Lengths to test, in the task's own unit; tasks that read a data set have none."""
    examples: int = 256
    """Examples of each length, or windows of text."""
    batch: int = 128
    """Examples answered at a time."""
    temperature: float | None = None
    """Also report accuracy of answers sampled at this temperature, beside greedy ones; TurboConn's
    paper uses 1."""
    max_new_tokens: int | None = None
    """Longest answer in tokens; two more than the longest right answer if left out."""

    def __post_init__(self) -> None:
        at_least(1, self, "examples", "batch", "max_new_tokens")
        at_most(MOST_ROWS, self, "batch")
        if self.temperature is not None and self.temperature <= 0:
            raise ConfigError(
                f"temperature is {self.temperature}; use more than 0: greedy answers are scored in "
                "any case"
            )
        if self.lengths and min(self.lengths) < 1:
            raise ConfigError(f"lengths holds {min(self.lengths)}; use 1 or more")


@dataclass(frozen=True)
class Recipe:
    """One experiment, trained once for each seed."""

    name: str
    """Name of the run, and of its folder."""
    task: Task
    """What to learn."""
    output: str = "runs"
    """Folder that the run's folder is made in."""
    seeds: tuple[int, ...] = (0,)
    """Each trains one model, in a folder seed-N of the run's folder: weights, data and sampling
    follow from it."""
    model: ModelSection = field(default_factory=ModelSection)
    """The model."""
    recurrence: Recurrence | None = None
    """The recurrence in time; none for the plain model."""
    depth: DepthSection | None = None
    """The recurrence in depth; none for a model whose layers run once."""
    solver: Solver = field(default_factory=Auto)
    """How the states of a sequence are found in training."""
    lora: LoRASection | None = None
    """Train low-rank adapters instead of the base model's weights."""
    training: TrainingSection = field(default_factory=TrainingSection)
    """Optimisation."""
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    """Evaluation after training, and by `undertow eval`."""
    plugins: tuple[str, ...] = ()
    """Modules, or paths of Python files, that register recurrences, solvers or tasks of one's own
    (docs/write-your-own.md)."""

    @classmethod
    def prepare(cls, mapping: Mapping[str, Any]) -> None:
        """Import the plugins, so that what they register can be named."""
        load_plugins(convert(tuple[str, ...], mapping.get("plugins", ()), "plugins"))

    def __post_init__(self) -> None:
        names = tuple(dict.fromkeys(full_name(name) for name in self.plugins))
        object.__setattr__(self, "plugins", names)
        check_place(self.name, self.output)
        check_seeds(self.seeds)
        if self.lora is not None and self.model.path is None:
            raise ConfigError(
                "lora adapts a pretrained model, but model.path is not set; set it or remove lora"
            )
        if self.depth is not None and self.depth.shape is not None:
            if self.model.path is not None:
                raise ConfigError(
                    "depth.shape builds a model from scratch, but model.path is set; remove one of "
                    "them"
                )
            self.model.refuse_changed(
                "width heads feed_forward positions tokenizer",
                "depth.shape's models do not have it; remove it",
            )
            if self.recurrence is not None:
                raise ConfigError(
                    "a native model (depth.shape) takes no recurrence in time; loop a model's "
                    "layers instead"
                )
        if self.model.pauses and self.recurrence is not None:
            raise ConfigError(
                "model.pauses and recurrence are two ways to compute more a token; remove one of "
                "them"
            )
        if self.evaluation.lengths and not self.task.endless:
            raise ConfigError(
                f"evaluation.lengths is set, but {self.task.kind} reads a file as it is; remove it"
            )
        for key in ("temperature", "max_new_tokens"):
            if getattr(self.evaluation, key) is not None and self.task.measured_by != "answers":
                raise ConfigError(
                    f"evaluation.{key} is set, but nothing is generated for {self.task.kind}, "
                    f"which is measured by its {self.task.measured_by}; remove it"
                )


@takes_paths
def load_recipe(path: Path, overrides: list[str], plugins: Sequence[str] = ()) -> Recipe:
    """Read a recipe from YAML with `--section.key=value` overrides applied, and with more plugins
    than it names itself.

    Raises:
        ConfigError: a key is unknown, or a value does not fit.
    """
    load_plugins(plugins)
    recipe = load_config(Recipe, path, overrides)
    return replace(recipe, plugins=(*recipe.plugins, *plugins))


def check_place(name: str, output: str) -> None:
    """Refuse a name that would lead out of the folder `output`, or that not every system can write,
    and no folder at all.

    Raises:
        ConfigError: the name is empty, hidden, too long, or holds a separator or what cannot be
            printed.
    """
    is_odd = not name.isprintable() or name != name.strip() or "/" in name or "\\" in name
    if not name or is_odd or name.startswith("."):
        raise ConfigError(
            f"name is {shown(name)}; it names a folder in output, so use letters, digits and "
            "hyphens"
        )
    if len(name.encode()) > LONGEST_NAME:
        raise ConfigError(
            f"name has {len(name.encode())} bytes, and names a folder; use {LONGEST_NAME} or fewer"
        )
    if not output.strip():
        raise ConfigError("output is empty; give the name of a folder, or . for the current one")


def check_seeds(seeds: Sequence[int]) -> None:
    """Refuse seeds that random generators do not take, and one that is given twice, whose runs
    would share a folder."""
    if not seeds:
        raise ConfigError("seeds is empty; give at least one seed")
    if min(seeds) < 0:
        raise ConfigError(f"seeds holds {min(seeds)}; use 0 or more")
    if max(seeds) >= 2**32:
        raise ConfigError(f"seeds holds {max(seeds)}; use less than 2^32")
    twice = next((seed for seed in seeds if seeds.count(seed) > 1), None)
    if twice is not None:
        raise ConfigError(f"seeds holds {twice} twice; give each once")


def at_most(largest: int, section: object, *names: str) -> None:
    """Refuse a larger value in any of the section's fields: a slip of the finger that would take
    all memory or time."""
    for name in names:
        value = getattr(section, name)
        if value is not None and value > largest:
            raise ConfigError(f"{name} is {value}; use {largest:,} or less")


def at_least(smallest: int, section: object, *names: str) -> None:
    """Refuse a smaller value in any of the section's fields; one that is left out is none."""
    for name in names:
        value = getattr(section, name)
        if value is not None and value < smallest:
            raise ConfigError(f"{name} is {value}; use {smallest} or more")
