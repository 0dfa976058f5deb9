"""Turn checkpoints into recurrent-depth models on disk: a pretrained model looped, or Huginn's
training weights imported."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoConfig

from undertow.depth.looped import Looped
from undertow.errors import CheckpointError, ConfigError, shown
from undertow.files import replacing_folder
from undertow.host import attach, detach
from undertow.lab.runs.loading import first_line, load, load_tokenizer, quiet_libraries
from undertow.models.huginn.importing import import_huginn, read_config
from undertow.paths import takes_paths

PROBE = 8  # tokens that the converted model is compared on


@takes_paths
def loop_checkpoint(source: str, output: Path, looped: Looped) -> str:
    """Loop the layers of the model in `source` and save it, tokenizer included, to `output`; what
    was done, in a sentence.

    The picks are checked on the way: with the adapter as it starts, one iteration is the model with
    the picked layers only.

    Raises:
        CheckpointError: there is no model there, or the folder cannot be written.
        ConfigError, UnsupportedArchitectureError: the layers cannot be looped.
    """
    quiet_libraries()
    model, tokenizer = load(source)
    model.eval()
    ids = torch.arange(PROBE)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        attach(model, looped)
        found = model(ids, use_cache=False, depth=1).logits
    whole = len(looped.picked) == model.config.get_text_config().num_hidden_layers
    if whole and not torch.equal(found, expected):
        detach(model)
        raise CheckpointError(
            f"one iteration of every layer does not reproduce the model in {source}; it was not "
            "saved"
        )
    with replacing_folder(Path(output)) as folder:
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    total = model.config.get_text_config().num_hidden_layers
    left_out = total - len(looped.picked)
    same = (
        "; one iteration equals the model, bit for bit"
        if whole
        else f"; {left_out} of {total} layers are left out"
    )
    shape = f"({len(looped.prelude)}, {len(looped.core)}, {len(looped.coda)})"
    return f"{output}: {shape} layers, {looped.depth} iterations{same}"


def looping(
    source: str,
    preset: str | None,
    whole: bool,
    layers: tuple[str | None, str | None, str | None],
    depth: int,
    injection: Literal["adapter", "none"],
) -> Looped:
    """What to loop of the model in `source`: a preset's layers, the whole stack with an exit gate,
    or the layers written as prelude, core and coda (see `picks`).

    Raises:
        CheckpointError: there is no model config.
        ConfigError: there is no such preset, or the layers cannot be looped.
    """
    if preset is not None:
        return Looped.preset(preset, depth=depth, injection=injection)
    if not whole:
        parts = [picks(text) for text in layers]
        return Looped(parts[0], parts[1], parts[2], depth=depth, injection=injection)
    try:
        config = AutoConfig.from_pretrained(source).get_text_config()
    except Exception as error:  # transformers raises any kind
        raise CheckpointError(f"{source} has no model config: {first_line(error)}") from error
    return Looped.whole(config.num_hidden_layers, depth)


@takes_paths
def import_checkpoint(
    source: str, output: Path, config: Path | None = None, tokenizer: str | None = None
) -> str:
    """Import Huginn's training weights (a file or folder) and save the model to `output`; what was
    done, in a sentence.

    Raises:
        CheckpointError: the weights or the config cannot be read, or do not fit each other.
    """
    quiet_libraries()
    words = None if tokenizer is None else load_tokenizer(tokenizer)  # told before reading weights
    model = import_huginn(Path(source), None if config is None else read_config(config))
    with replacing_folder(Path(output)) as folder:
        if words is not None:
            words.save_pretrained(folder)
        model.save_pretrained(folder)
    without = (
        "; it has no tokenizer, which text needs: --tokenizer writes one"
        if tokenizer is None
        else ""
    )
    return (
        f"{output}: {sum(parameter.numel() for parameter in model.parameters()):,} "
        f"parameters{without}"
    )


def picks(text: str | None) -> tuple[int, ...]:
    """Layers written as 0-3 or 0,2,5-7; none for an empty text.

    Raises:
        ConfigError: it is written otherwise.
    """
    found: list[int] = []
    for part in (text or "").replace(" ", "").split(","):
        first, _, last = part.partition("-")
        if not part:
            continue
        if not re.fullmatch(r"[0-9]{1,4}(-[0-9]{1,4})?", part):
            raise ConfigError(f"layers {shown(text)} are not written as 0-3 or 0,2,5-7")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)
