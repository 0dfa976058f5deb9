"""Tasks: what to learn and be tested on, and its way to token ids. Knows data and text, no models."""

from undertow.tasks.arithmetic import MultiStepArithmetic
from undertow.tasks.base import GeneratedTask, PromptedTask, Task, split_of
from undertow.tasks.big_bench import BigBenchArithmetic
from undertow.tasks.chat import Chat
from undertow.tasks.dataset import PadCollator, TaskDataset, model_inputs, real_tokens
from undertow.tasks.encode import encode, encode_prompt
from undertow.tasks.example import Example, Split
from undertow.tasks.groups import GroupTracking
from undertow.tasks.gsm8k import GSM8K
from undertow.tasks.gsm_symbolic import GSMSymbolic
from undertow.tasks.hotpotqa import HotpotQA
from undertow.tasks.parity import Parity
from undertow.tasks.prosqa import ProsQA
from undertow.tasks.retrieval import GroupRetrieval
from undertow.tasks.text import Text
from undertow.tasks.tokenizer import character_tokenizer
from undertow.tasks.variables import VariableAssignment

TASKS: dict[str, type[Task]] = {
    task.kind: task
    for task in (
        Parity,
        MultiStepArithmetic,
        BigBenchArithmetic,
        GroupTracking,
        GroupRetrieval,
        VariableAssignment,
        ProsQA,
        GSM8K,
        GSMSymbolic,
        HotpotQA,
        Text,
        Chat,
    )
}
"""Every task by its kind, as recipes name it."""

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
