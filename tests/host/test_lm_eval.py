"""lm-eval takes a hosted model as an object; run where lm-eval is installed (the extra `eval`)."""

from __future__ import annotations

import pytest
import torch
from helpers import hosted
from torch.nn import functional as F

from undertow.lab.tasks import character_tokenizer

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM


def request(kind: str, arguments: tuple[object, ...]) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("pathway", ["t2mlr-middle", "turboconn-3"])
def test_log_likelihoods_and_text_are_those_of_the_model(pathway: str) -> None:
    model = hosted("llama", pathway)
    tokenizer = character_tokenizer("abcdefghijklmnop ")
    evaluated = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2)
    pairs = [("abc de", "fgh"), ("a", "b"), ("ponm lk", "ji")]
    found = evaluated.loglikelihood(
        [request("loglikelihood", pair) for pair in pairs], disable_tqdm=True
    )
    for (context, continuation), (score, _) in zip(pairs, found, strict=True):
        ids = torch.tensor([tokenizer(context + continuation)["input_ids"]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
        assert abs(score + float(loss[-len(continuation) :].sum())) < 1e-3

    contexts = ["abc de", "p"]
    settings = {"until": ["<eos>"], "max_gen_toks": 5, "do_sample": False}
    asked = [request("generate_until", (context, settings)) for context in contexts]
    for context, text in zip(
        contexts, evaluated.generate_until(asked, disable_tqdm=True), strict=True
    ):
        ids = torch.tensor([tokenizer(context)["input_ids"]])
        alone = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False
        )
        assert text == tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True)
