"""Tiny randomly initialised Hugging Face causal LMs, one per architecture."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 97
COMMON: dict[str, Any] = (  # a config takes the fields it declares
    dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    | dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=128, sliding_window=6)
    | dict(
        pad_token_id=0,
        unpadded_vocab_size=VOCAB,
        ffn_dim=64,
        word_embed_proj_dim=32,
        max_seq_len=128,
    )
    | dict(
        num_experts=4,
        num_local_experts=4,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
    )
    | dict(
        moe_intermediate_size=32, shared_intermediate_size=32, shared_expert_intermediate_size=32
    )
    | dict(embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5, logit_scale=0.5)
    | dict(kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)
    | dict(index_topk=4, index_head_dim=8, index_n_heads=2, first_k_dense_replace=1, topk_group=1)
    | dict(vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8, num_kv_shared_layers=0)
    | dict(laurel_rank=4, n_layers_per_attn_res_block=2, linear_head_dim=8, linear_num_heads=4)
    | dict(
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    | dict(
        mamba_n_heads=4,
        mamba_n_groups=1,
        mamba_d_state=8,
        mamba_chunk_size=8,
        state_size=8,
        chunk_size=8,
    )
)
MIXED = ["sliding_attention", "full_attention"] * 2
LINEAR = ["linear_attention", "full_attention"] * 2


def _lm(model: str, **fields: Any) -> Callable[[], PreTrainedModel]:
    """A function that builds the class `model` from `COMMON` and `fields`, without dropout."""

    def make() -> PreTrainedModel:
        cls = getattr(transformers, model)
        known = {f.name for f in dataclasses.fields(cls.config_class)} | set(
            cls.config_class.attribute_map
        )
        config = cls.config_class(**({k: v for k, v in COMMON.items() if k in known} | fields))
        for name, value in vars(config).items():
            if name.endswith(("drop", "dropout")) and isinstance(value, float):
                setattr(config, name, 0.0)
        config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 1, None
        return cls(config)

    return make


# Attention and MLP (or MoE) layers in a plain `h = layer(h, ...)` loop.
ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _lm("LlamaForCausalLM"),
    "apertus": _lm("ApertusForCausalLM"),
    "arcee": _lm("ArceeForCausalLM"),
    "bitnet": _lm("BitNetForCausalLM"),
    "bloom": _lm("BloomForCausalLM"),
    "codegen": _lm("CodeGenForCausalLM", rotary_dim=4),
    "cohere": _lm("CohereForCausalLM"),
    "cohere2": _lm("Cohere2ForCausalLM", layer_types=MIXED),
    "deepseek_v2": _lm("DeepseekV2ForCausalLM", num_key_value_heads=4, n_group=2),
    "deepseek_v3": _lm("DeepseekV3ForCausalLM", num_key_value_heads=4, n_group=2),
    "dots1": _lm("Dots1ForCausalLM", layer_types=MIXED),
    "ernie4_5": _lm("Ernie4_5ForCausalLM"),
    "ernie4_5_moe": _lm("Ernie4_5_MoeForCausalLM", moe_num_experts=4, moe_k=2),
    "exaone4": _lm("Exaone4ForCausalLM", layer_types=MIXED),
    "falcon": _lm("FalconForCausalLM"),
    "falcon_alibi": _lm("FalconForCausalLM", alibi=True),
    "falcon_new": _lm("FalconForCausalLM", new_decoder_architecture=True, num_kv_heads=2),
    "gemma": _lm("GemmaForCausalLM"),
    "gemma2": _lm("Gemma2ForCausalLM", layer_types=MIXED),
    "gemma3": _lm("Gemma3ForCausalLM", layer_types=MIXED),
    "glm": _lm("GlmForCausalLM"),
    "glm4": _lm("Glm4ForCausalLM"),
    "glm4_moe": _lm("Glm4MoeForCausalLM"),
    "gpt2": _lm("GPT2LMHeadModel"),
    "gpt_bigcode": _lm("GPTBigCodeForCausalLM"),
    "gpt_neo": _lm("GPTNeoForCausalLM", attention_types=[[["global", "local"], 2]], window_size=6),
    "gpt_neox": _lm("GPTNeoXForCausalLM"),
    "gpt_oss": _lm("GptOssForCausalLM", layer_types=MIXED),
    "gptj": _lm("GPTJForCausalLM", rotary_dim=4),
    "granite": _lm("GraniteForCausalLM"),
    "granitemoe": _lm("GraniteMoeForCausalLM"),
    "granitemoeshared": _lm("GraniteMoeSharedForCausalLM"),
    "helium": _lm("HeliumForCausalLM"),
    "hunyuan_v1_dense": _lm("HunYuanDenseV1ForCausalLM"),
    "hunyuan_v1_moe": _lm("HunYuanMoEV1ForCausalLM"),
    "jetmoe": _lm("JetMoeForCausalLM", kv_channels=8),
    "llama4": _lm("Llama4ForCausalLM", intermediate_size_mlp=64),
    "minicpm3": _lm("MiniCPM3ForCausalLM", num_key_value_heads=4, dim_model_base=16),
    "ministral": _lm("MinistralForCausalLM", layer_types=MIXED),
    "mistral": _lm("MistralForCausalLM"),
    "mixtral": _lm("MixtralForCausalLM"),
    "mpt": _lm("MptForCausalLM"),
    "nanochat": _lm("NanoChatForCausalLM"),
    "nemotron": _lm("NemotronForCausalLM"),
    "olmo": _lm("OlmoForCausalLM"),
    "olmo2": _lm("Olmo2ForCausalLM"),
    "olmo3": _lm("Olmo3ForCausalLM", layer_types=MIXED),
    "olmoe": _lm("OlmoeForCausalLM"),
    "opt": _lm("OPTForCausalLM"),
    "persimmon": _lm("PersimmonForCausalLM"),
    "phi": _lm("PhiForCausalLM"),
    "phi3": _lm("Phi3ForCausalLM"),
    "phimoe": _lm("PhimoeForCausalLM"),
    "qwen2": _lm("Qwen2ForCausalLM"),
    "qwen2_moe": _lm("Qwen2MoeForCausalLM"),
    "qwen3": _lm("Qwen3ForCausalLM"),
    "qwen3_swa": _lm("Qwen3ForCausalLM", use_sliding_window=True, max_window_layers=2),
    "qwen3_moe": _lm("Qwen3MoeForCausalLM"),
    "seed_oss": _lm("SeedOssForCausalLM"),
    "smollm3": _lm("SmolLM3ForCausalLM"),
    "stablelm": _lm("StableLmForCausalLM"),
    "starcoder2": _lm("Starcoder2ForCausalLM"),
    "vaultgemma": _lm("VaultGemmaForCausalLM", layer_types=MIXED),
    "xglm": _lm("XGLMForCausalLM", d_model=32, num_layers=4, attention_heads=4),
}

# Layers that need more than the residual stream and their KV cache: a state passed from layer to
# layer, or a recurrent state of their own.
UNSUPPORTED: dict[str, Callable[[], PreTrainedModel]] = {
    "bamba": _lm("BambaForCausalLM", attn_layer_indices=[1, 3]),
    "deepseek_v4": _lm("DeepseekV4ForCausalLM"),
    "falcon_h1": _lm("FalconH1ForCausalLM", mamba_d_ssm=32, mamba_d_head=8),
    "falcon_mamba": _lm("FalconMambaForCausalLM"),
    "gemma3n": _lm("Gemma3nForCausalLM", layer_types=MIXED, activation_sparsity_pattern=[0.0] * 4),
    "gemma4": _lm("Gemma4ForCausalLM", layer_types=MIXED, global_head_dim=8),
    "gemma4_shared": _lm(
        "Gemma4ForCausalLM", layer_types=MIXED, num_kv_shared_layers=2, global_head_dim=8
    ),
    "glm_moe_dsa": _lm(
        "GlmMoeDsaForCausalLM", num_key_value_heads=4, indexer_types=["full", "shared"] * 2
    ),
    "granitemoehybrid": _lm("GraniteMoeHybridForCausalLM", layer_types=LINEAR),
    "hrm_text": _lm("HrmTextForCausalLM", num_hidden_layers=2),
    "hy_v4": _lm("HYV4ForCausalLM", num_key_value_heads=4),
    "inkling2": _lm("Inkling2ForCausalLM"),
    "inkling2_loop": _lm(
        "Inkling2LoopForCausalLM", loop_layer_index_start=2, loop_layer_index_end=4
    ),
    "jamba": _lm(
        "JambaForCausalLM", attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False
    ),
    "kimi_linear": _lm(
        "KimiLinearForCausalLM", num_key_value_heads=4, n_group=2, layer_types=LINEAR
    ),
    "lfm2": _lm("Lfm2ForCausalLM", layer_types=["conv", "full_attention"] * 2),
    "mamba": _lm("MambaForCausalLM"),
    "mamba2": _lm("Mamba2ForCausalLM", num_heads=4, head_dim=16, n_groups=1, expand=2),
    "minimax": _lm("MiniMaxForCausalLM", layer_types=LINEAR, block_size=8),
    "nemotron_h": _lm("NemotronHForCausalLM"),
    "olmo_hybrid": _lm("OlmoHybridForCausalLM", layer_types=LINEAR),
    "qwen3_5": _lm("Qwen3_5ForCausalLM", layer_types=LINEAR),
    "qwen3_next": _lm("Qwen3NextForCausalLM", layer_types=LINEAR),
    "recurrent_gemma": _lm("RecurrentGemmaForCausalLM", attention_window_size=6, lru_width=32),
    "rwkv": _lm("RwkvForCausalLM", context_length=128),
    "xlstm": _lm("xLSTMForCausalLM", num_heads=4, qk_dim_factor=1.0),
    "zamba2": _lm(
        "Zamba2ForCausalLM", layers_block_type=["linear_attention", "hybrid"] * 2, n_mamba_heads=4
    ),
    "zaya": _lm("ZayaForCausalLM", num_experts_per_tok=1, router_hidden_size=8),
}

# The token embedding is multiplied by 4 and every other matrix by this, or greedy text is one
# repeated token.
FACTORS = dict.fromkeys(ARCHITECTURES, 12.0) | dict(
    bloom=20.0, gpt_neox=32.0, phi=32.0, xglm=32.0, zaya=12.0
)


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """Build one model in eval mode, its weights spread out so that errors show in the logits."""
    torch.manual_seed(seed)
    model = (ARCHITECTURES | UNSUPPORTED)[name]().float().eval()
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2:
                p.mul_(4.0 if p is embedding else FACTORS.get(name, 4.0))
    return model
