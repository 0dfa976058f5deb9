"""The native model: numbers, layout, initialisation, gradients, saving and importing."""

import copy
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import CACHE
from literal_huginn import literal_logits
from safetensors.torch import save_file
from small_huginn import VOCAB, ids, small
from tiny import environment
from transformers import AutoConfig, AutoModelForCausalLM

from undertow.depth import LatentDifference
from undertow.errors import CheckpointError, ConfigError, DataError
from undertow.models import HuginnConfig, HuginnForCausalLM
from undertow.models.huginn.importing import import_huginn


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_equals_the_equations_written_out(depth: int) -> None:
    model, tokens = small(), ids(1, 6)
    initial = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = model(tokens, depth=depth, initial=initial).logits[0]
    expected = literal_logits(model, tokens[0], initial[0], depth)
    assert float((found - expected).abs().max() / expected.std()) < 1e-4
    other = literal_logits(model, tokens[0], initial[0], depth + 1)
    assert float((found - other).abs().max() / expected.std()) > 1e-2  # the depth counts


def test_released_shape_and_layout() -> None:
    with torch.device("meta"):
        model = HuginnForCausalLM(HuginnConfig())
    assert sum(parameter.numel() for parameter in model.parameters()) == 3_564_976_800
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    core = {
        name.removeprefix("transformer.core_block.3."): s
        for name, s in shapes.items()
        if ".core_block.3." in name
    }
    assert core == {
        **{f"norm_{i}.weight": [5280] for i in range(1, 5)},
        "attn.Wqkv.weight": [15840, 5280],
        "attn.qk_bias": [2, 1, 55, 96],
        "attn.proj.weight": [5280, 5280],
        "mlp.fc.weight": [35840, 5280],
        "mlp.proj.weight": [5280, 17920],
    }
    assert shapes["transformer.wte.weight"] == shapes["lm_head.weight"] == [65536, 5280]
    assert shapes["transformer.adapter.weight"] == [5280, 10560]
    assert shapes["freqs_cis"] == [1, 4096, 1, 48, 2]
    blocks = [
        f"{part}.{i}."
        for part, n in (("prelude", 2), ("core_block", 4), ("coda", 2))
        for i in range(n)
    ]
    assert len(shapes) == 9 * len(blocks) + 5
    assert model.config.expected_depth == 132


def test_initialisation_is_scaled() -> None:
    torch.manual_seed(0)
    config = HuginnConfig(
        n_embd=160, n_heads=4, intermediate_size=300, vocab_size=512, block_size=8
    )
    model = HuginnForCausalLM(config)
    std = (2 / (5 * 160)) ** 0.5
    cut = 0.9866  # what a cut at three standard deviations leaves of one
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_f" in name:
            assert bool((parameter == 1).all())
        elif "qk_bias" in name:
            assert bool((parameter == 0).all())
        else:
            ends_a_branch = name.endswith(("attn.proj.weight", "mlp.proj.weight"))
            expected = std / (2 * 132) ** 0.5 if ends_a_branch else std
            assert abs(float(parameter.detach().std()) / (cut * expected) - 1) < 0.03, name
            assert float(parameter.detach().abs().max()) <= 3.001 * expected
    assert model.lm_head.weight is model.transformer["wte"].weight
    logits = model(ids(1, 4)).logits
    assert float(logits.float().softmax(-1).max()) < 0.2


@pytest.mark.parametrize("training", [True, False])
def test_gradient_through_the_last_iterations_in_either_mode(training: bool) -> None:
    model = copy.deepcopy(small()).train(training)
    tokens = ids(2, 7)
    model(tokens, labels=tokens, depth=5).loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert all(float(g.abs().sum()) > 0 for g in found.values())
    model.zero_grad()
    model(tokens, labels=tokens, depth=(2, 3)).loss.backward()  # mean_backprop_depth is 3
    assert all(torch.equal(p.grad, found[name]) for name, p in model.named_parameters())
    model.zero_grad()
    model(tokens, labels=tokens, depth=(0, 5)).loss.backward()
    assert not torch.allclose(
        model.transformer["adapter"].weight.grad, found["transformer.adapter.weight"]
    )
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(tokens, labels=tokens, depth=5, use_cache=False).loss.backward()
    assert all(
        torch.allclose(p.grad, found[name], atol=1e-6) for name, p in model.named_parameters()
    )


@pytest.mark.parametrize("learning", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_packed_document_is_read_as_it_is_alone(rows: int, learning: bool) -> None:
    model, first, second = small(), ids(rows, 5), ids(rows, 7, seed=3)
    packed, positions = (
        torch.cat([first, second], dim=1),
        torch.cat([torch.arange(5), torch.arange(7)])[None],
    )
    with torch.set_grad_enabled(learning):
        together = model(packed, position_ids=positions).logits.detach()
        for found, document in ((together[:, :5], first), (together[:, 5:], second)):
            alone = model(document).logits.detach()
            assert float((found - alone).abs().max() / alone.std()) < 1e-4
        # Controls: one document of all tokens, and positions that start again beside a mask, which
        # says what is seen.
        alone = model(second).logits.detach()
        for inputs in ({}, {"position_ids": positions, "attention_mask": torch.ones_like(packed)}):
            other = model(packed, **inputs).logits.detach()[:, 5:]
            assert float((other - alone).abs().max() / alone.std()) > 1e-2


def test_packed_documents_with_exits_and_caches() -> None:
    model, tokens = small(), ids(1, 12)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad():
        found = model(
            tokens, position_ids=positions, exit_rule=LatentDifference(1e-9), depth=6
        ).logits[:, 5:]
        alone = model(tokens[:, 5:], depth=6).logits
        assert float((found - alone).abs().max() / alone.std()) < 1e-4
        with pytest.raises(DataError, match="set use_cache=False"):
            model(tokens, position_ids=positions, use_cache=True)
        cache = model(tokens[:, :3], use_cache=True)[CACHE]
        with pytest.raises(DataError, match="set use_cache=False"):
            model(tokens, position_ids=positions, cache=cache)
        model(tokens[:, 3:], position_ids=torch.arange(3, 12)[None], cache=cache)


def test_labels_are_shifted() -> None:
    model, tokens = small(), ids(2, 7)
    output = model(tokens, labels=tokens, depth=3)
    expected = torch.nn.functional.cross_entropy(
        output.logits[:, :-1].reshape(-1, VOCAB), tokens[:, 1:].reshape(-1)
    )
    assert torch.allclose(output.loss, expected)


def test_save_and_load_in_another_process(tmp_path: Path) -> None:
    model, tokens = small(), ids(2, 5)
    model.save_pretrained(tmp_path / "model")
    assert list((tmp_path / "model").glob("*.safetensors"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(loaded) is HuginnForCausalLM
    with torch.no_grad():
        expected = model(tokens, depth=4).logits
        assert torch.equal(loaded(tokens, depth=4).logits, expected)
    torch.save((tokens, expected), tmp_path / "expected.pt")
    program = (
        "import sys, torch, undertow; from transformers import AutoModelForCausalLM\n"
        "tokens, expected = torch.load(sys.argv[1] + '/expected.pt')\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1] + '/model')\n"
        "torch.set_num_threads(1)\n"
        "with torch.no_grad(): found = model(tokens, depth=4).logits\n"
        "assert torch.allclose(found, expected, atol=1e-6)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, env=environment())


def test_bf16_keeps_positions_exact() -> None:
    model = copy.deepcopy(small()).to(torch.bfloat16)
    tokens = ids(1, 5)
    positions = torch.arange(1000, 1005)[None]
    with torch.no_grad():
        blurred = model(tokens, depth=2, position_ids=positions).logits
        sharp = small()(tokens, depth=2, position_ids=positions).logits
    assert float((blurred - sharp).abs().max() / sharp.std()) < 0.3


@pytest.mark.parametrize(
    "prefix", ["_orig_mod._original_module.", "module._fsdp_wrapped_module.", ""]
)
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_import_strips_training_prefixes(tmp_path: Path, prefix: str, suffix: str) -> None:
    model, tokens = small(), ids(1, 4)
    weights = {prefix + name: tensor.clone() for name, tensor in model.state_dict().items()}
    del weights[prefix + "lm_head.weight"]
    path = tmp_path / f"checkpoint{suffix}"
    save_file(weights, path) if suffix == ".safetensors" else torch.save({"model": weights}, path)
    loaded = import_huginn(path, model.config).eval()
    with torch.no_grad():
        assert torch.equal(loaded(tokens, depth=2).logits, model(tokens, depth=2).logits)


def test_import_refuses_what_does_not_fit(tmp_path: Path) -> None:
    model = small()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def attempt(changed: dict[str, torch.Tensor], match: str) -> None:
        save_file(changed, tmp_path / "w.safetensors")
        with pytest.raises(CheckpointError, match=match):
            import_huginn(tmp_path / "w.safetensors", model.config)

    name = "transformer.adapter.weight"
    attempt({k: v for k, v in weights.items() if k != name}, f"lacks {name}")
    attempt(
        weights | {name: torch.zeros(32, 32)}, r"shape \[32, 32\] in the checkpoint and \[32, 64\]"
    )
    attempt(weights | {"transformer.extra": torch.zeros(1)}, "holds transformer.extra")
    attempt(weights | {"lm_head.weight": weights["lm_head.weight"] + 1}, "tie_embeddings")
    attempt(weights | {f"module.{name}": weights[name].clone()}, "twice")
    (tmp_path / "broken.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="cannot be read"):
        import_huginn(tmp_path / "broken.safetensors", model.config)
    with pytest.raises(CheckpointError, match="config"):
        import_huginn(tmp_path / "broken.safetensors")


def test_mistakes() -> None:
    model, tokens = small(), ids(2, 4)
    for depth in (0, -2):
        with pytest.raises(ConfigError, match="depth is"):
            model(tokens, depth=depth)
    with pytest.raises(DataError, match="attention_mask"):
        model(tokens, attention_mask=torch.ones(2, 3))
    with pytest.raises(DataError, match="initial has shape"):
        model(tokens, initial=torch.zeros(2, 3, 32))
    with pytest.raises(DataError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ConfigError, match="even width"):
        HuginnConfig(n_embd=30, n_heads=4)


@pytest.mark.parametrize(
    "name, value",
    [
        ("n_heads", 0),
        ("num_attention_heads", 0),
        ("n_embd", 0),
        ("vocab_size", 0),
        ("block_size", 0),
        ("intermediate_size", 2.0),
        ("n_layers_in_prelude", -1),
        ("n_layers_in_recurrent_block", 0),
        ("n_layers_in_recurrent_block", 1.5),
        ("n_layers_in_coda", "2"),
    ],
)
def test_config_refuses_what_makes_no_model(name: str, value: Any) -> None:
    with pytest.raises(
        ConfigError, match=f"{name.replace('num_attention', 'n')} is {value!r}; use a whole number"
    ):
        HuginnConfig(**{name: value})


@pytest.mark.parametrize(
    "name, value",
    [
        ("injection_type", "add"),
        ("bias", True),
        ("state_init", "zero"),
        ("init_scale", 2.0),
        ("nonlin_name", "GELU"),
        ("norm_class_name", "LayerNorm"),
        ("block_class_name", "TransformerPreNormBlock"),
        ("test_time_noise", 0.1),
    ],
)
def test_config_refuses_another_arithmetic(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value!r}"):
        HuginnConfig(**{name: value})
    small().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"{name} is {value!r}"):
        AutoModelForCausalLM.from_pretrained(tmp_path, **{name: value})


def test_reads_a_config_in_the_public_layout(tmp_path: Path) -> None:
    public = {
        "architectures": ["RavenForCausalLM"],
        "model_type": "huginn_raven",
        "torch_dtype": "bfloat16",
        "n_embd": 192,
        "n_heads": 2,
        "n_layers": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 96,
        "intermediate_size": 256,
        "vocab_size": 128,
        "padded_vocab_size": 128,
        "padding_multiple": 64,
        "block_size": 32,
        "bias": False,
        "architecture_class_name": "RecurrentGPT",
        "block_class_name": "SandwichBlock",
        "norm_class_name": "RMSNorm_llama",
        "norm_eps": 1e-6,
        "mlp_class_name": "GatedMLP",
        "nonlin_name": "SiLU",
        "init_strategy": "takase",
        "init_orthogonal": False,
        "init_values": {"std": 0.05, "out_proj": 0.003, "embedding": 0.05, "embed_scale": 13.9},
        "state_init": "like-init",
        "injection_type": "linear",
        "n_layers_in_prelude": 2,
        "n_layers_in_recurrent_block": 4,
        "n_layers_in_coda": 2,
        "mean_recurrence": 32,
        "mean_backprop_depth": 8,
        "effective_expected_depth": 132,
        "sampling_scheme": "poisson-lognormal-filling",
        "activation_checkpoint_impl": "per-iteration",
        "qk_bias": True,
        "rope_base": 50000,
        "test_time_noise": 0,
        "test_time_noise_type": "fixed",
        "tie_embeddings": True,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(public), encoding="utf-8")
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is HuginnConfig and (
        config.head_dim,
        config.num_key_value_heads,
        config.n_layers,
    ) == (96, 2, 8)
    config.save_pretrained(tmp_path / "again")
    again = AutoConfig.from_pretrained(tmp_path / "again")
    assert again.to_dict() | {"_name_or_path": config._name_or_path} == config.to_dict()


def test_forward_refuses_what_it_does_not_read() -> None:
    model, tokens = small(), ids(1, 4)
    asked: dict[str, tuple[Any, str]] = {
        "num_steps": (4, "give it as depth"),
        "input_states": (torch.zeros(1, 4, 32), "initial"),
        "init_scale": (0.5, "initial"),
        "output_hidden_states": (True, "undertow.lab.inspections"),
        "output_attentions": (True, "leave it out"),
        "return_dict": (False, "fields"),
    }
    for name, (value, instead) in asked.items():
        with pytest.raises(ConfigError, match=f"{name} is not read by .*{instead}"):
            model(tokens, **{name: value})
    with pytest.raises(ConfigError, match="output_hidden_states"):
        model.generate(tokens, max_new_tokens=1, output_hidden_states=True)
    with torch.no_grad():
        found = model(
            tokens,
            depth=2,
            output_hidden_states=False,
            output_attentions=None,
            return_dict=True,
            num_steps=None,
        )
        assert torch.equal(found.logits, model(tokens, depth=2).logits)
    assert model.generate(tokens, max_new_tokens=2, output_attentions=False, depth=2).shape[1] > 4


@pytest.mark.parametrize("tied", [True, False])
def test_loading_refuses_weights_that_do_not_fit(tmp_path: Path, tied: bool) -> None:
    model, name = small(seed=4, tie_embeddings=tied), "transformer.adapter.weight"
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert (
        not info["missing_keys"]
        and (loaded.lm_head.weight is loaded.transformer["wte"].weight) == tied
    )
    assert all(torch.equal(p, loaded.get_parameter(key)) for key, p in model.named_parameters())
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}

    def attempt(changed: dict[str, torch.Tensor], match: str) -> None:
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=f"{match}.* undertow convert --huginn"):
            AutoModelForCausalLM.from_pretrained(tmp_path)

    attempt({k: v for k, v in weights.items() if k != name}, f"lacks {name}")
    attempt(weights | {"transformer.extra": torch.zeros(1)}, r"holds transformer\.extra, which")
    attempt({f"_orig_mod.{k}": v for k, v in weights.items()}, r"holds _orig_mod\.")
    attempt(
        weights | {name: torch.zeros(32, 32)},
        rf"holds {name} of shape \[32, 32\], which is \[32, 64\]",
    )
    if not tied:
        attempt({k: v for k, v in weights.items() if k != "lm_head.weight"}, "lacks lm_head")
    save_file(
        weights | {name: torch.zeros(32, 32)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    AutoModelForCausalLM.from_pretrained(tmp_path, ignore_mismatched_sizes=True)


def test_import_drops_second_copies_and_unpickles_nothing(tmp_path: Path) -> None:
    model, tokens = small(), ids(1, 4)
    weights = {f"_orig_mod.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    copies = {f"_forward_module.{name}": torch.zeros(1) for name in weights}
    torch.save({"model": weights | copies}, tmp_path / "w.pth")
    with torch.no_grad():
        loaded = import_huginn(tmp_path / "w.pth", model.config).eval()
        assert torch.equal(loaded(tokens, depth=2).logits, model(tokens, depth=2).logits)
    torch.save({"model": weights, "config": types.SimpleNamespace(n_embd=32)}, tmp_path / "w.pth")
    with pytest.raises(
        CheckpointError, match=r'nothing is unpickled.* re-save only .* state\["model"\]$'
    ):
        import_huginn(tmp_path / "w.pth", model.config)
