"""Tasks: examples with checkable answers, and their way to token ids. Knows data and text, no models."""

from undertow.tasks.arithmetic import MultiStepArithmetic
from undertow.tasks.base import Example, GeneratedTask, Split, Task, split_of
from undertow.tasks.big_bench import BigBenchArithmetic
from undertow.tasks.encode import PadCollator, TaskDataset, encode, encode_prompt
from undertow.tasks.gsm8k import GSM8K
from undertow.tasks.parity import Parity
from undertow.tasks.tokenizer import character_tokenizer

TASKS: dict[str, type[Task]] = {task.kind: task for task in (Parity, MultiStepArithmetic, BigBenchArithmetic, GSM8K)}
"""Every task by its kind, as recipes name it."""

__all__ = [
    "GSM8K",
    "TASKS",
    "BigBenchArithmetic",
    "Example",
    "GeneratedTask",
    "MultiStepArithmetic",
    "PadCollator",
    "Parity",
    "Split",
    "Task",
    "TaskDataset",
    "character_tokenizer",
    "encode",
    "encode_prompt",
    "split_of",
]
