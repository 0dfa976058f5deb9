"""The Huginn model as a `transformers` causal language model whose forward and `generate` take a
depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import find_packed_sequence_indices
from transformers.utils import TransformersKwargs

from undertow.depth.arguments import LOOP_ARGUMENTS, loop_arguments, refuse_near
from undertow.depth.cache import DepthCache, cache_keyword
from undertow.depth.exits import ExitRule
from undertow.depth.forward import DepthForward
from undertow.depth.loop import Steps
from undertow.distributed import kept_whole
from undertow.errors import CheckpointError, ConfigError, DataError
from undertow.models.huginn.blocks import (
    Attention,
    BranchEnd,
    Context,
    RMSNorm,
    SandwichBlock,
    rotary_frequencies,
    rotary_table,
)
from undertow.models.huginn.config import HuginnConfig
from undertow.models.huginn.layers import HuginnLayers, HuginnOutput, kept

# Arguments that other code gives to a forward and that would be dropped here in silence: the values
# that ask for nothing, and what to do instead of any other.
UNREAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_steps": ((None,), "give it as depth"),
    "input_states": ((None,), "give them as initial"),
    "init_scale": ((None, 1), "give scaled states as initial"),
    "output_hidden_states": (
        (None, False),
        "give watch, or use undertow.lab.inspections.inspect_depth, to see the states",
    ),
    "output_attentions": ((None, False), "leave it out, as attention weights are never formed"),
    "recurrent_mask": ((None,), "leave it out, as there is no recurrence in time"),
    "return_dict": ((None, True), "leave it out and read the output's fields, such as logits"),
}
KNOWN = frozenset({*LOOP_ARGUMENTS, *UNREAD, *TransformersKwargs.__annotations__})


class HuginnForCausalLM(PreTrainedModel, GenerationMixin):
    """Prelude, looped core and coda with a tied head, in the released checkpoint's layout (arXiv
    2502.05171)."""

    config: HuginnConfig
    config_class = HuginnConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["SandwichBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012
    _supports_sdpa = True
    _supports_cache_class = True
    # A checkpoint may hold the rotary table in any precision, or not at all: it is computed, in
    # fp32.
    _keys_to_ignore_on_load_missing = ["freqs_cis"]  # noqa: RUF012

    def __init__(self, config: HuginnConfig) -> None:
        config.check()  # again: loading sets overrides on a config that is made
        super().__init__(config)
        prelude = config.n_layers_in_prelude
        core = config.n_layers_in_recurrent_block
        coda = config.n_layers_in_coda

        def blocks(start: int, count: int) -> nn.ModuleList:
            return nn.ModuleList(
                SandwichBlock(config, layer) for layer in range(start, start + count)
            )

        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "prelude": blocks(0, prelude),
                "adapter": nn.Linear(2 * config.n_embd, config.n_embd, bias=False),
                "core_block": blocks(prelude, core),
                "coda": blocks(prelude + core, coda),
                "ln_f": RMSNorm(config.n_embd, config.norm_eps),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        # Only for the checkpoint's layout: angles are computed from the positions, which a cast to
        # bf16 cannot blur.
        self.register_buffer("freqs_cis", rotary_table(config), persistent=True)
        self.gradient_checkpointing = False
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model; arguments as for any `from_pretrained`.

        Raises:
            CheckpointError: a weight is missing, unknown or, without `ignore_mismatched_sizes`, of
                another shape.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        any_shape = kwargs.pop("ignore_mismatched_sizes", False)
        # The library's own refusal of other shapes does not name them.
        settings = {**kwargs, "output_loading_info": True, "ignore_mismatched_sizes": True}
        loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *args, **settings)
        model, info = loaded
        check_loaded(pretrained_model_name_or_path, info, any_shape)
        return loaded if wants_info else model

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer["wte"]

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.transformer["wte"] = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    def depth_handle(self) -> HuginnDepth:
        return HuginnDepth(self)

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        check_names(model_kwargs)
        super()._validate_model_kwargs(model_kwargs)  # type: ignore[misc]  # annotated for a protocol of the library's own

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Scaled initialisation: σ = √(2/5h), divided by √(2 · depth) where a residual branch ends.

        The training code of the paper, unlike its released model file, gives both halves of `fc`
        the same σ.
        """
        std = self.config.std
        if isinstance(module, nn.Linear | nn.Embedding):
            std = (
                std / (2 * self.config.expected_depth) ** 0.5
                if isinstance(module, BranchEnd)
                else std
            )
            nn.init.trunc_normal_(module.weight, std=std, a=-3 * std, b=3 * std)
        elif isinstance(module, Attention) and module.qk_bias is not None:
            nn.init.zeros_(module.qk_bias)
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, HuginnForCausalLM):
            module.freqs_cis.copy_(rotary_table(self.config))  # type: ignore[operator]

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        depth: int | tuple[int, int] | Steps | None = None,
        exit_rule: ExitRule | None = None,
        warm_start: bool = False,
        resume: int = 0,
        state_seed: int | torch.Tensor | None = None,
        initial: torch.Tensor | None = None,
        watch: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None,
        **kwargs: Any,
    ) -> HuginnOutput:
        """Logits of ``input_ids`` ``[B, T]`` after what the cache holds.

        Args:
            attention_mask: ``[B, cached + T]``, 0 at padding on either side.
            position_ids: absolute positions ``[B, T]`` or ``[1, T]``; counted from the mask by
                default. Where there is no mask and they start again, a packed document begins,
                which is read as it would be alone.
            labels: the input ids themselves, -100 where there is no loss; they are shifted here, as
                transformers does.
            depth: iterations r, of which the last `mean_backprop_depth` carry gradient, or
                (without, with gradient); the mean recurrence by default. Whether in training or
                evaluation mode makes no difference.
            exit_rule: lets each token stop before `depth`. Without gradients only.
            warm_start: a continued row's first new token starts from the last token's state instead
                of noise.
            resume: the new tokens have run this many iterations, on this cache, before it was
                cropped by them: go on there.
            state_seed: seed of the initial states, one or one a row ``[B]``; the config's by
                default.
            initial: initial states ``[B, T, D]`` instead of noise.
            watch: called after each iteration with its number and the states before and after.

        Raises:
            ConfigError: the depth is below 1, an exit rule is given where it cannot work, or an
                argument is given that other models read and this one does not.
            DataError: inputs are missing or do not fit each other, or packed documents are given
                beside a cache.
        """
        check_names(kwargs)
        asked = loop_arguments(
            {
                "depth": depth,
                "exit_rule": exit_rule,
                "warm_start": warm_start,
                "resume": resume,
                "state_seed": state_seed,
                "initial": initial,
                "watch": watch,
            }
        )
        if (input_ids is None) == (inputs_embeds is None):
            raise DataError("give either input_ids or inputs_embeds")
        embedded = self.transformer["wte"](input_ids) if inputs_embeds is None else inputs_embeds
        batch, tokens = embedded.shape[:2]
        cache = cache if cache is not None else past_key_values
        returned = cache is not None or bool(use_cache)
        if cache is None and returned:
            cache = DepthCache(tokens=tokens)
        past = 0 if cache is None else int(cache.get_seq_length())
        mask = padding(attention_mask, batch, past + tokens, embedded.device)
        document = None
        if attention_mask is None and position_ids is not None and tokens > 1:
            document = find_packed_sequence_indices(position_ids)
        if document is not None and returned:
            raise DataError(
                "position_ids start again, as in packed documents, which a cache would mix; set "
                "use_cache=False"
            )
        learning = torch.is_grad_enabled() and (
            embedded.requires_grad or any(p.requires_grad for p in self.parameters())
        )
        handle = self.depth_handle()
        forward = DepthForward(handle, asked, embedded, cache, learning, mask, position_ids)
        context = self.context(forward, document)
        checkpointing = bool(self.gradient_checkpointing) and cache is None
        layers = HuginnLayers(self.transformer, context, checkpointing)
        core: Any = self.transformer["core_block"]
        with kept_whole(core) as until_backward:
            hidden = forward.run(layers, embedded * self.config.embedding_scale)
            hidden = until_backward(hidden)
        which = kept(logits_to_keep)
        logits = (
            handle.logits(hidden[:, which]) if forward.logits is None else forward.logits[:, which]
        )
        forward.finish()

        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        held: dict[str, Any] = {cache_keyword(): cache} if returned else {}
        return HuginnOutput(
            loss=loss, logits=logits, states=forward.states, depths=forward.depths, **held
        )

    def context(self, forward: DepthForward, document: torch.Tensor | None) -> Context:
        """What the layers need of positions, padding and packed documents, which `document` ``[B or
        1, T]`` numbers."""
        positions, mask = forward.positions, forward.mask
        past, tokens = forward.past, forward.tokens
        device = positions.device
        angles = positions[..., None].float() * rotary_frequencies(self.config, device)
        allowed = None
        if mask is not None:
            own = torch.arange(past, past + tokens, device=device)
            keys = torch.arange(past + tokens, device=device)
            causal = keys[None] <= own[:, None]
            # A padding token sees itself: a query that sees nothing has no attention.
            allowed = (causal & mask[:, None, :] | (keys[None] == own[:, None]))[:, None]
        elif document is not None:
            allowed = (document[:, :, None] == document[:, None]).tril()[:, None]
        elif past and tokens > 1:
            allowed = torch.ones(tokens, past + tokens, dtype=torch.bool, device=device).tril(past)[
                None, None
            ]
        turns = torch.complex(angles.cos(), angles.sin())[:, :, None]
        return Context(turns, allowed, forward.cache)


class HuginnDepth:
    """The handle of a Huginn model (see `DepthHandle`)."""

    owner = "Huginn"

    def __init__(self, model: HuginnForCausalLM) -> None:
        self.model, self.settings = model, model.config.loop()

    @property
    def layers(self) -> int:
        return int(self.model.config.n_layers)

    @property
    def looped(self) -> Sequence[nn.Module]:
        return self.model.transformer["adapter"], self.model.transformer["core_block"]

    def set_depth(self, depth: int) -> None:
        self.model.config.mean_recurrence = depth
        self.settings = self.model.config.loop()

    def depths(self, output: HuginnOutput) -> torch.Tensor:
        assert output.depths is not None
        return output.depths

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """In fp32."""
        logits: torch.Tensor = self.model.lm_head(self.model.transformer["ln_f"](hidden)).float()
        return logits

    def gate(self, state: torch.Tensor) -> torch.Tensor:
        raise ConfigError(
            "Huginn has no exit gate; use a rule that looks at the state or the logits"
        )


def padding(
    mask: torch.Tensor | None, batch: int, tokens: int, device: torch.device
) -> torch.Tensor | None:
    """Which of all `tokens`, those of the cache included, are real ``[B, tokens]``; None if all
    are."""
    if mask is None:
        return None
    if mask.ndim != 2 or mask.shape[1] < tokens or mask.shape[0] not in (1, batch):
        raise DataError(
            f"attention_mask has shape {list(mask.shape)}; it needs [{batch}, {tokens}], 0 at "
            "padding"
        )
    mask = mask[:, :tokens].bool().to(device).expand(batch, -1)
    return None if bool(mask.all()) else mask


def check_names(given: dict[str, Any]) -> None:
    """Refuse keywords that nothing here reads and that ask for something, or are near one that is
    read."""
    for name, (idle, instead) in UNREAD.items():
        if given.get(name) not in idle:
            raise ConfigError(f"{name} is not read by Huginn's forward; {instead}")
    if unknown := given.keys() - KNOWN:
        refuse_near("HuginnForCausalLM", sorted(unknown), LOOP_ARGUMENTS)


def check_loaded(source: Any, info: dict[str, Any], any_shape: bool) -> None:
    """Refuse a checkpoint whose weights are not the model's: the library would make up what it does
    not find."""
    # Unknown names come before missing ones: where training put a prefix before the names, they
    # show it.
    if info["unexpected_keys"]:
        problem = f"holds {min(info['unexpected_keys'])}, which the config's model lacks"
    elif info["missing_keys"]:
        problem = f"lacks {min(info['missing_keys'])}"
    elif info["mismatched_keys"] and not any_shape:
        name, found, expected = min(info["mismatched_keys"])
        problem = f"holds {name} of shape {list(found)}, which is {list(expected)} by the config"
    else:
        return
    raise CheckpointError(
        f"{source} {problem}; give the config that it was saved with, and bring a raw training "
        "checkpoint into this layout with undertow convert --huginn"
    )


AutoConfig.register(HuginnConfig.model_type, HuginnConfig)
AutoModelForCausalLM.register(HuginnConfig, HuginnForCausalLM)
