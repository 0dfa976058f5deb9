"""Read Huginn weights as training wrote them: wrapped in prefixes, as one file or several."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from undertow.errors import CheckpointError, nearest
from undertow.models.huginn.config import HuginnConfig
from undertow.models.huginn.model import HuginnForCausalLM
from undertow.paths import takes_paths
from undertow.reading import read_json

# What torch.compile, distributed wrappers and the training code put before each name, in any order
# and number.
PREFIXES = ("_orig_mod.", "_original_module.", "_fsdp_wrapped_module.", "module.", "model.")
# In the names of a second copy of each weight, which a wrapper left in the public training
# checkpoints.
COPY = "_forward_module"
TIED = "lm_head.weight", "transformer.wte.weight"


@takes_paths
def import_huginn(
    source: Path, config: HuginnConfig | None = None, dtype: torch.dtype | None = None
) -> HuginnForCausalLM:
    """A model with the weights in `source`: a safetensors or torch file, or a folder of
    safetensors.

    `config` is read from the folder's `config.json` if it is not given.

    Raises:
        CheckpointError: a file cannot be read, or its weights are not those of the config's model.
    """
    source = Path(source)
    if config is None:
        path = (source if source.is_dir() else source.parent) / "config.json"
        if not path.is_file():
            raise CheckpointError(f"{source} has no config.json beside it; give the config")
        config = read_config(path)
    model = HuginnForCausalLM(config)
    load_weights(model, read_weights(source))
    if dtype is not None:
        model.to(dtype)  # type: ignore[arg-type]
    return model


def read_config(path: Path) -> HuginnConfig:
    """The config in a JSON file.

    Raises:
        CheckpointError: it cannot be read, or is not that of such a model.
    """
    try:
        config: HuginnConfig = HuginnConfig.from_dict(read_json(path, CheckpointError))
    except CheckpointError:
        raise
    except Exception as error:  # the config's own checks raise any kind
        raise CheckpointError(f"{path} is a config that cannot be read: {error}") from error
    return config


@takes_paths
def read_weights(source: Path) -> dict[str, torch.Tensor]:
    """All tensors in a file or a folder, by name."""
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    if not files or not all(file.is_file() for file in files):
        raise CheckpointError(
            f"{source} holds no weights: give a .safetensors or torch file, or a folder of "
            "safetensors"
        )
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            if file.suffix == ".safetensors":
                weights |= load_file(file)
            else:
                held = torch.load(file, map_location="cpu", weights_only=True)
                weights |= held.get("model", held) if isinstance(held, dict) else {}
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{file} is damaged or holds more than tensors, and nothing is unpickled; if you "
                "trust it, load it elsewhere"
                ' and re-save only the state dict of the model, state["model"]'
            ) from error
        except Exception as error:  # safetensors, pickle and zip readers raise any kind
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    return weights


def strip_prefixes(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights without the prefixes that training wrappers put before their names, and
    without second copies.

    Raises:
        CheckpointError: two names become one.
    """
    stripped: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if COPY in name:
            continue
        while True:
            prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
            if prefix is None:
                break
            name = name.removeprefix(prefix)
        if name in stripped:
            raise CheckpointError(f"the checkpoint holds {name} twice, under different prefixes")
        stripped[name] = tensor
    return stripped


def load_weights(model: HuginnForCausalLM, weights: Mapping[str, torch.Tensor]) -> None:
    """Put `weights` into the model; the rotary table is left out, as it is computed.

    Raises:
        CheckpointError: a weight is missing, unknown, of another shape, or at odds with the one it
            is tied to.
    """
    found = strip_prefixes(weights)
    found.pop("freqs_cis", None)
    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "freqs_cis"}
    head, embedding = TIED
    if model.config.tie_embeddings:
        if head in found and embedding in found and not torch.equal(found[head], found[embedding]):
            raise CheckpointError(
                f"{head} and {embedding} differ, but the config ties them; set tie_embeddings to "
                "false"
            )
        shared = found.get(embedding, found.get(head))
        if shared is not None:
            found[head] = found[embedding] = shared
    for name in expected:
        if name not in found:
            raise CheckpointError(f"the checkpoint lacks {name}{nearest(name, found)}")
    for name, tensor in found.items():
        if name not in expected:
            raise CheckpointError(
                f"the checkpoint holds {name}, which this model lacks{nearest(name, expected)}"
            )
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f"{name} has shape {list(tensor.shape)} in the checkpoint and "
                f"{list(expected[name].shape)} by the config; give the config that it was trained "
                "with"
            )
    model.load_state_dict(found, strict=False)
