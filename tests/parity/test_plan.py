"""The plan's counts against closed forms of modules small enough to count by hand."""

import torch

from trtdiff.families.base import ComponentSpec
from trtdiff.parity.plan import cost
from trtdiff.types import TensorSpec


def spec_of(module):
    return ComponentSpec(
        name="x",
        folder="x",
        inputs=(TensorSpec("a", "float32", ("batch", 64)),),
        outputs=(),
        build=lambda _config: module(),
        prefix="x",
    )


class Chain(torch.nn.Module):
    """64 → 1000 → 10, then summed with what came before it: the wide tensor dies, the narrow one lives."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = torch.nn.Linear(64, 1000), torch.nn.Linear(1000, 10)

    def forward(self, a):
        return self.narrow(self.wide(a))


class Attention(torch.nn.Module):
    def forward(self, a):
        query = a.reshape(a.shape[0], 1, 4, 16)
        return torch.nn.functional.scaled_dot_product_attention(query, query, query)


def test_flops_and_live_bytes_of_two_linears():
    found = cost(spec_of(Chain), {}, {"batch": 8})
    assert found.flops == 2 * 8 * (64 * 1000 + 1000 * 10)
    assert found.activation_bytes == 4 * 8 * (1000 + 10)  # both outputs at once, no weights, inputs not counted
    assert found.attention_bytes == 0


def test_scores_of_attention_are_counted_though_pytorch_never_holds_them():
    assert cost(spec_of(Attention), {}, {"batch": 8}).attention_bytes == 8 * 4 * 4 * 4
