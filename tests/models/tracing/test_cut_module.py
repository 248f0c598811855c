"""Modules that are taken apart into layers by running them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.errors import ModelError
from windlass.models.build import layer_stack_of
from windlass.models.layer_stack import layer_stack_from_module
from windlass.schema import LoraRequest

VOCABULARY, WIDTH, LONGEST = 40, 16, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.down(self.up(self.norm(x)).relu())
        return x + (y if scale is None else y * scale)


class NanoGPT(nn.Module):
    """As the models of nanoGPT: modules in a dictionary, tied weights, the loss inside."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(LONGEST, WIDTH),
                "h": nn.ModuleList([Block() for _ in range(blocks)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def enter(self, idx: Tensor) -> Tensor:
        _, t = idx.size()
        assert t <= LONGEST, f"cannot forward a sequence of {t}"
        positions = torch.arange(0, t, dtype=torch.long, device=idx.device)
        return self.transformer.wte(idx) + self.transformer.wpe(positions)

    def run_blocks(self, idx: Tensor, x: Tensor) -> Tensor:  # noqa: ARG002  others read tokens
        for block in self.transformer.h:
            x = block(x)
        return x

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.transformer.ln_f(self.run_blocks(idx, self.enter(idx)))
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        flat = logits.view(-1, logits.size(-1))
        return logits, functional.cross_entropy(flat, targets.view(-1), ignore_index=-1)


class EncoderModel(nn.Module):
    """A language model of torch's own encoder, with a causal mask made in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(1, LONGEST, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        t = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(t)
        return self.head(self.encoder(self.embed(tokens) + self.positions[:, :t], mask=mask))


class TiedByUse(nn.Module):
    """A head that reads the weight of the embedding, and a table of masks beside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(0.5)
        self.register_buffer("table", torch.rand(LONGEST, 1))
        self.scale = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, tokens: Tensor) -> Tensor:
        table = self.table[: tokens.shape[1]]
        x = self.drop(self.embed(tokens))
        for block in self.blocks:
            x = block(x, scale=table)
        return functional.linear(x * self.scale, self.embed.weight)


def tokens(batch: int = 3, sequence: int = 7) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, sequence))


def test_a_nanogpt_class_becomes_a_stack_of_equal_blocks_with_tied_ends():
    stack = layer_stack_from_module(NanoGPT(), "mine")

    blocks = tuple(f"transformer.h.{i}" for i in range(3))
    assert stack.names == ("embeddings", *blocks, "head")
    assert stack.kinds == ("embeddings", "block", "block", "block", "head")
    assert (stack.vocabulary, stack.max_sequence) == (VOCABULARY, LONGEST)
    assert stack.tied_weights == {"head.lm_head.weight": "embeddings.transformer.wte.weight"}


@pytest.mark.parametrize("make", [NanoGPT, EncoderModel, TiedByUse])
def test_the_layers_of_a_module_give_its_logits_and_share_its_weights(
    make: Callable[[], nn.Module],
):
    module = make().eval()
    layers = layer_stack_from_module(module, "mine").layers
    x = batch = tokens()

    for layer in layers:
        x = layer(x)
    whole = module(batch, batch)[0] if make is NanoGPT else module(batch)

    assert torch.equal(x, whole)
    own = {id(weight) for layer in layers for weight in layer.parameters()}
    assert own == {id(weight) for weight in module.parameters()}


def test_a_mask_made_once_for_all_blocks_is_made_again_in_each():
    stack = layer_stack_from_module(EncoderModel().train(), "mine")

    assert stack.kinds[1] == stack.kinds[2] == "transformer_encoder_layer"
    assert stack.names[1:3] == ("encoder.layers.0", "encoder.layers.1")
    x = torch.randn(2, 9, WIDTH)
    later = torch.cat((x[:, :5], torch.randn(2, 4, WIDTH)), dim=1)
    layer = stack.layers[1].eval()
    torch.testing.assert_close(layer(x)[:, :5], layer(later)[:, :5])


def test_a_weight_that_a_head_reads_is_tied_and_a_table_beside_the_blocks_is_kept():
    module = TiedByUse()
    stack = layer_stack_from_module(module, "mine")

    assert stack.kinds == ("embeddings", "block", "block", "head")
    assert stack.tied_weights == {"head.embed.weight": "embeddings.embed.weight"}
    state = {
        stack.name_in_module(f"{name}.{path}")
        for name, layer in zip(stack.names, stack.layers, strict=True)
        for path in layer.state_dict()
    }
    assert state == module.state_dict().keys()


class Patches(nn.Module):
    """A vision transformer that is no sequence, with a token of its own before the patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(len(x), -1, -1), x), dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


def test_a_module_that_takes_images_is_taken_apart():
    module = Patches()
    stack = layer_stack_from_module(module, "mine", input_shape=(3, 8, 8))
    x = images = torch.randn(2, 3, 8, 8)

    for layer in stack.layers:
        x = layer(x)

    assert stack.names == ("embeddings", "blocks.0", "blocks.1", "head")
    assert torch.equal(x, module(images))


def test_blocks_that_take_the_hidden_state_alone_are_layers_as_they_are():
    module = NanoGPT()

    assert layer_stack_from_module(module, "mine").layers[1:-1] == tuple(module.transformer.h)


def test_a_module_on_the_meta_device_is_taken_apart_as_well():
    with torch.device("meta"):
        modules = NanoGPT(), EncoderModel()
    names = [layer_stack_from_module(module, "mine").names for module in modules]

    assert names[0][0] == names[1][0] == "embeddings"


def test_a_length_that_the_module_asserts_is_asserted_by_its_first_layer():
    stack = layer_stack_from_module(NanoGPT(), "mine")

    with pytest.raises(AssertionError, match="cannot forward a sequence of 33"):
        stack.layers[0](tokens(1, LONGEST + 1))


def test_a_table_of_positions_that_is_a_parameter_limits_the_sequence():
    assert layer_stack_from_module(EncoderModel(), "mine").max_sequence == LONGEST


def test_weights_have_the_names_of_the_module_when_they_leave_the_stack():
    module = NanoGPT()
    stack = layer_stack_from_module(module, "mine")

    names = {
        stack.name_in_module(f"{name}.{path}")
        for name, layer in zip(stack.names, stack.layers, strict=True)
        for path, _ in layer.named_parameters()
    }

    assert names == {path for path, _ in module.named_parameters(remove_duplicate=False)}


def test_adapters_stand_beside_the_linear_layers_of_the_blocks():
    lora = LoraRequest(rank=2)

    stack = layer_stack_of(NanoGPT(), "mine", {}, device="cpu", seed=0, lora=lora)

    trained = [
        [path for path, weight in layer.named_parameters() if weight.requires_grad]
        for layer in stack.layers
    ]
    block = ["up.lora_a", "up.lora_b", "down.lora_a", "down.lora_b"]
    assert trained == [[], block, block, block, []]


class SeveralLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([Block(), Block()])
        self.decoder = nn.ModuleList([Block(), Block()])


class BranchesOnNumbers(NanoGPT):
    def run_blocks(self, idx: Tensor, x: Tensor) -> Tensor:
        if idx.sum() > 3:
            x = x * 2
        return super().run_blocks(idx, x)


class FeedsNumbers(NanoGPT):
    def run_blocks(self, idx: Tensor, x: Tensor) -> Tensor:
        padding = (idx > 0).float().unsqueeze(-1)
        for block in self.transformer.h:
            x = block(x, padding)
        return x


class SkipsToTheEnd(NanoGPT):
    def run_blocks(self, idx: Tensor, x: Tensor) -> Tensor:
        return super().run_blocks(idx, x) + x


class RunsTwice(NanoGPT):
    def run_blocks(self, idx: Tensor, x: Tensor) -> Tensor:
        return super().run_blocks(idx, super().run_blocks(idx, x))


class OwnLoss(NanoGPT):
    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits, loss = super().forward(idx, targets)
        return logits, None if loss is None else loss * 2


class ReadsTargets(NanoGPT):
    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        logits, _ = super().forward(idx, targets)
        return logits * targets.unsqueeze(-1)


class KeepsCount(NanoGPT):
    calls = 0

    def run_blocks(self, idx: Tensor, x: Tensor) -> Tensor:
        self.calls += 1
        return super().run_blocks(idx, x * self.calls)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (SeveralLists, "several lists of blocks, `encoder` and `decoder`, and a stack is one"),
        (BranchesOnNumbers, r"test_cut_module.py:\d+, `if idx.sum\(\) > 3:`, depends on the numb"),
        (
            FeedsNumbers,
            "block `transformer.h.0` takes `1` beside the hidden state, made of the input",
        ),
        (
            SkipsToTheEnd,
            "its output is made of the input beside the hidden state after the last block",
        ),
        (RunsTwice, r"`transformer.h.0`, .*, and each must run once"),
        (OwnLoss, "computes a loss of its own"),
        (ReadsTargets, "its logits depend on targets"),
        (KeepsCount, "the logits of its layers differ from its own by"),
        (lambda: nn.Linear(3, 3), "a `Linear` without an `nn.ModuleList`"),
    ],
)
def test_what_stands_in_the_way_is_one_sentence(module: Callable[[], nn.Module], message: str):
    with pytest.raises(ModelError, match=message) as error:
        layer_stack_from_module(module(), "mine")

    assert "\n" not in str(error.value)
