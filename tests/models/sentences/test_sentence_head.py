"""A sentence head reads the first token of each document of a row."""

import torch

from windlass.models.build import build_layer_stack
from windlass.models.sentences import first_places
from windlass.runtime.layer_templates import LayerTemplate

CLOSE = 1e-12
"""Relative, in float64: sums in another order."""


def test_a_pair_in_a_packed_row_has_the_losses_that_it_has_alone() -> None:
    dials = {"layers": 1, "width": 16, "heads": 2, "vocabulary": 40, "sentence_head": True}
    stack = build_layer_stack("bert-tiny", dials, device="cpu")
    templates = []
    for index, layer in enumerate(stack.layers):
        for parameter in layer.double().parameters():
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
        templates.append(LayerTemplate(layer, last=index == 2, compiled=False))

    def losses(
        tokens: list[list[int]], targets: list[list[int]], documents: list[list[int]]
    ) -> torch.Tensor:
        x = torch.tensor(tokens)
        for layer, template in zip(stack.layers, templates, strict=True):
            x = template(
                list(layer.parameters()), [], None, x, torch.tensor(targets),
                torch.tensor(documents), seed=0,
            )  # fmt: skip
        return x

    one, two = [1, 2, 43, 44], [5, 6, 7, 48, 49]
    none = -100
    packed = losses(
        [[*one, *two, 0]], [[none, 9, none, 8, none, none, 3, none, 2, none, 1, 0, none]],
        [[0] * 4 + [1] * 5 + [2]],
    )  # fmt: skip
    first = losses([one], [[none, 9, none, 8, 1, none, none]], [[0] * 4])
    second = losses([two], [[none, none, 3, none, 2, 0, none, none]], [[0] * 5])
    torch.testing.assert_close(packed, (first + second) / 2, rtol=CLOSE, atol=0)


def test_a_document_that_a_row_lacks_has_place_0() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 2], [0, 0, 0, 0, 1]])
    assert first_places(documents).tolist() == [[0, 2, 4], [0, 4, 0]]
