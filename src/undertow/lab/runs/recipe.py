"""A recipe: one experiment as a frozen dataclass, read from YAML. Its field docs are the command
line's help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from undertow.errors import ConfigError, shown
from undertow.lab.runs.depth import DepthSection
from undertow.lab.tasks import Task
from undertow.mapping import load_config
from undertow.paths import takes_paths
from undertow.pathways import Recurrence
from undertow.plugins import full_name, load_plugins
from undertow.settings import Share, settings
from undertow.solvers import Auto, Solver

LONGEST_NAME = 200
"""Bytes of a name: file systems take 255, of which some are for temporary names."""
MOST_LAYERS = 10_000
# No larger numbers than anyone means: a slip of the finger would take all memory or time.
Number = Annotated[int, Field(ge=1, le=2**31 - 1)]
Width = Annotated[int, Field(ge=1, le=2**24)]
Rows = Annotated[int, Field(ge=1, le=2**20)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]


@settings
class ModelSection:
    """The model: loaded from a folder or a hub name, or built from scratch in any shape."""

    path: str | None = None
    """Folder or hub name of a pretrained model and its tokenizer; without it, a model is built from
    the keys below."""
    architecture: str = "llama"
    """A transformers model type, such as llama, qwen3 or gpt2; or lstm, which has no heads and
    takes no recurrence."""
    layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)] = 2
    """Number of decoder layers."""
    width: Width = 64
    """Hidden size."""
    heads: Width = 4
    """Attention heads."""
    head_width: Width | None = None
    """Width of an attention head; the hidden size over the heads if left out."""
    key_value_heads: Width | None = None
    """Key-value heads, for grouped-query attention; as many as there are heads if left out."""
    feed_forward: Width | None = None
    """Width of the feed-forward layers; 8/3 of the hidden size, rounded to a multiple of 8, if left
    out."""
    positions: Number = 2048
    """Longest sequence that the model is made for."""
    initializer_range: NonNegativeFloat | None = None
    """Standard deviation of the initial weight matrices; width ** -0.5 if left out, which suits
    small models."""
    embedding_range: NonNegativeFloat = 1.0
    """Standard deviation of the initial token embeddings. At 1 small models learn to track a state
    in a fraction of the steps that they need at a matrix's scale."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer of a model built from scratch; one token a character if
    left out."""
    vocabulary: Number | None = None
    """Rows of the token embeddings, if they shall be more than the tokenizer's tokens."""
    tied: bool = False
    """Use the token embeddings as the head too; they then want an embedding_range of about 0.02."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Further settings of the architecture's config, by its own names: `no_rope_layers: [0, 0]` of
    smollm3 makes two layers without positions."""
    pauses: Annotated[int, Field(ge=0, le=MOST_LAYERS)] = 0
    """Pause tokens that the model reads after each token before it predicts; 1 is the T²MLR paper's
    2x baseline."""

    def __post_init__(self) -> None:
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


@settings
class LoRASection:
    """Low-rank adapters on the base model; the recurrence is always trained whole."""

    rank: Width = 16
    """Rank of the adapters."""
    alpha: PositiveInt | None = None
    """Scale of the adapters' output over their rank; as large as the rank if left out."""
    dropout: Share = 0.0
    """Dropout on the adapters' input."""
    targets: tuple[str, ...] | None = None
    """Names of the adapted linear layers; all of them but the head if left out."""
    save: Literal["merged", "adapter"] = "merged"
    """What a run leaves behind: a whole model with the adapters merged into it, or a small folder
    with adapters and recurrence, which PEFT loads on the base model."""


@settings
class TrainingSection:
    """Optimisation by transformers.Trainer with AdamW."""

    steps: Number = 1000
    """Optimiser steps."""
    epochs: Number | None = None
    """Passes over the training examples; if it is set, steps follow from it."""
    examples: Number | None = None
    """Train on the first so many examples of the split, again and again; if left out on all of a
    data set, and on a generated task's without end."""
    batch: Rows = 64
    """Examples a forward pass."""
    accumulate: Rows = 1
    """Forward passes whose gradients make one step."""
    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate."""
    schedule: Literal["constant_with_warmup", "linear", "cosine", "cosine_restarts"] = (
        "constant_with_warmup"
    )
    """How the learning rate goes on after the warm-up. cosine_restarts, TurboConn's, begins anew
    every so many steps, with the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0, le=2**31 - 1)] = 100
    """Steps over which the learning rate rises from zero."""
    floor: Share = 0.0
    """Share of the peak learning rate that a cosine schedule ends at; the T²MLR paper's code takes
    0.001 to pretrain and 0.01 to fine-tune."""
    restart_every: Number = 1000
    """Steps from one start of cosine_restarts to the next."""
    gate_multiplier: NonNegativeFloat = 1.0
    """How much faster T²MLR's two gammas learn than the rest. They start at zero and open the
    recurrence, so small models learn much sooner with 10 to 30; the paper's code takes 100 for
    GSM8K."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW's weight decay; norms and biases have none."""
    beta2: Share = 0.95
    """AdamW's second beta."""
    clip: NonNegativeFloat = 1.0
    """Largest norm of the gradient; a larger one is scaled down to it."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Arithmetic of matrix products in training: fp32; tf32, which GPUs since Ampere have; or bf16
    by autocast. Weights and optimiser stay in fp32, and with bf16 what is evaluated after training.
    Most CPUs are many times slower in bf16."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass, to save memory."""
    bucket_by_length: bool = True
    """Make batches of examples of similar length, so that little is spent on padding."""
    max_tokens: PositiveInt | None = None
    """Longest example in tokens; longer ones are left out, counted and reported."""
    log_every: PositiveInt = 10
    """Steps between two lines of the log."""
    evaluate_every: PositiveInt | None = None
    """Steps between two losses on held-out examples; only one at the end if left out."""
    evaluate_examples: NonNegativeInt = 256
    """Held-out examples for that loss; 0 for none."""
    save_every: PositiveInt | Literal["auto"] | None = "auto"
    """Steps between two checkpoints to resume from. auto: one every ten minutes, or less often
    where saving takes long; null: none. Whatever it is, SIGINT and SIGTERM save one."""
    compare_every: PositiveInt = 100
    """Steps between two comparisons of a solver that is not exact with the rollout; the log has
    what they find."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of the training process; the machine's default if left out."""
    compile: Literal["none", "regional"] = "none"
    """regional: compile each layer by itself, once and for any length. It takes some tens of
    seconds and a C++ compiler, and pays in long trainings by sweeps."""
    sharding: Literal["none", "full"] = "none"
    """What several processes hold: none, the whole model each (DDP); full, a part of it each
    (FSDP2), which takes a GPU each."""
    report_to: Literal["tensorboard", "wandb", "trackio"] | None = None
    """Where the log goes besides the run's folder, by the tracker's own package; nowhere if left
    out."""

    def __post_init__(self) -> None:
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


@settings
class EvaluationSection:
    """Accuracy by length, or the loss a token of text."""

    lengths: tuple[PositiveInt, ...] = ()
    """Lengths to test, in the task's own unit; tasks that read a data set have none."""
    examples: PositiveInt = 256
    """Examples of each length, or windows of text."""
    batch: Rows = 128
    """Examples answered at a time."""
    temperature: PositiveFloat | None = None
    """Also report accuracy of answers sampled at this temperature, beside greedy ones; TurboConn's
    paper uses 1."""
    max_new_tokens: PositiveInt | None = None
    """Longest answer in tokens; two more than the longest right answer if left out."""


@settings
class Recipe:
    """One experiment, trained once for each seed."""

    name: str
    """Name of the run, and of its folder."""
    task: Task
    """What to learn."""
    output: str = "runs"
    """Folder that the run's folder is made in."""
    seeds: tuple[Seed, ...] = (0,)
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
        named = mapping.get("plugins")
        if isinstance(named, list | tuple) and all(isinstance(each, str) for each in named):
            load_plugins(named)  # all else the field refuses

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
    """Refuse no seeds, and one that is given twice, whose runs would share a folder."""
    if not seeds:
        raise ConfigError("seeds is empty; give at least one seed")
    twice = next((seed for seed in seeds if seeds.count(seed) > 1), None)
    if twice is not None:
        raise ConfigError(f"seeds holds {twice} twice; give each once")
