"""The main promises once for each of the supported architectures, in one go: a net with a wide
mesh."""

import pytest
import reference
import torch
import zoo
from helpers import (
    CHANGED,
    PATHWAYS,
    SAME,
    difference,
    generate,
    logits,
    randomize,
    recurrent_parameters,
    some,
    steps,
    tokens,
)

import undertow


@pytest.mark.parametrize(("name", "pathway"), some(zoo.ARCHITECTURES))
def test_identity_definition_decoding_and_padding(name: str, pathway: str) -> None:
    settings, ids = PATHWAYS[pathway], tokens(2, 10)
    base, model = zoo.build(name), undertow.attach(zoo.build(name), settings)
    plain = logits(base, ids)
    if pathway != "soft-token":
        assert difference(logits(model, ids), plain) < 1e-4, "untrained, it changes nothing"
    randomize(model)
    assert difference(logits(model, ids), plain) > CHANGED, "trained, it does"

    sequences, decoded = steps(model, ids, new=8)
    forced = logits(model, sequences)
    assert difference(decoded, forced[:, 9:-1]) < SAME, "decoding equals the teacher-forced pass"
    with torch.no_grad():
        naive = reference.rollout(base, settings, recurrent_parameters(model), sequences)
    assert difference(forced, naive) < SAME, "both equal the definition"

    padded = torch.cat([torch.zeros(2, 4, dtype=torch.long), ids], dim=1)
    padded[0] = torch.cat([ids[1], torch.tensor([5, 6, 7, 8])])
    mask = torch.ones_like(padded)
    mask[1, :4] = 0
    together = generate(model, padded, attention_mask=mask)
    assert torch.equal(together[1, 4:], generate(model, ids[1:])[0]), (
        "a left-padded row equals the row alone"
    )
    assert torch.equal(together[:1], generate(model, padded[:1]))
