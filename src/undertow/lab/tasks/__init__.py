"""Tasks: what to learn and be tested on, and its way to token ids. Knows data and text, no
models."""

from collections.abc import Mapping

from undertow.lab.tasks.arithmetic import MultiStepArithmetic
from undertow.lab.tasks.base import GeneratedTask, PromptedTask, Task, split_of
from undertow.lab.tasks.big_bench import BigBenchArithmetic
from undertow.lab.tasks.chat import Chat
from undertow.lab.tasks.dataset import PadCollator, TaskDataset, model_inputs, real_tokens
from undertow.lab.tasks.encode import encode, encode_prompt
from undertow.lab.tasks.example import Example, Split
from undertow.lab.tasks.groups import GroupTracking
from undertow.lab.tasks.gsm8k import GSM8K
from undertow.lab.tasks.gsm_symbolic import GSMSymbolic
from undertow.lab.tasks.hotpotqa import HotpotQA
from undertow.lab.tasks.parity import Parity
from undertow.lab.tasks.prosqa import ProsQA
from undertow.lab.tasks.retrieval import GroupRetrieval
from undertow.lab.tasks.shards import Shards
from undertow.lab.tasks.text import Text
from undertow.lab.tasks.tokenizer import character_tokenizer
from undertow.lab.tasks.variables import VariableAssignment
from undertow.registry import kinds

TASKS: Mapping[str, type[Task]] = kinds(Task)
"""Every registered task by its kind, as recipes name it."""

__all__ = [
    "GSM8K",
    "TASKS",
    "BigBenchArithmetic",
    "Chat",
    "Example",
    "GSMSymbolic",
    "GeneratedTask",
    "GroupRetrieval",
    "GroupTracking",
    "HotpotQA",
    "MultiStepArithmetic",
    "PadCollator",
    "Parity",
    "PromptedTask",
    "ProsQA",
    "Shards",
    "Split",
    "Task",
    "TaskDataset",
    "Text",
    "VariableAssignment",
    "character_tokenizer",
    "encode",
    "encode_prompt",
    "model_inputs",
    "real_tokens",
    "split_of",
]
