"""The fingerprints; what they find between real ranks is in test_two_ranks.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_accum_fix.errors import UnsupportedSetupError
from hf_accum_fix.monitor.replicas import Replicas, _sum_of_bits

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool, torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 3, 8, 1001])
def test_a_fingerprint_is_that_of_the_numbers_wherever_they_lie(count: int, dtype: torch.dtype) -> None:
    lying = (10 * torch.randn(count + 3)).to(dtype)[3:]
    assert _sum_of_bits(lying) == _sum_of_bits(lying.clone())
    changed = lying.clone()
    changed[count // 2] = changed[count // 2] + 1 if dtype is not torch.bool else ~changed[count // 2]
    assert _sum_of_bits(lying) != _sum_of_bits(changed)


def test_a_fingerprint_knows_no_memory_format() -> None:
    images = torch.randn(2, 3, 5, 7)
    assert _sum_of_bits(images) == _sum_of_bits(images.to(memory_format=torch.channels_last))
    assert _sum_of_bits(torch.zeros(0)) == 0 and _sum_of_bits(torch.tensor(3.0)) == _sum_of_bits(torch.tensor([3.0]))


class OtherRank:
    """A second rank that holds what this one holds."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.sums: list[Tensor] = []

    def sum(self, tensor: Tensor) -> Tensor:
        self.sums.append(tensor)
        return tensor + tensor.flip(0)


def test_every_so_many_steps_one_sum_of_three_integers_a_rank() -> None:
    model = nn.Linear(3, 4)
    ranks = OtherRank()
    replicas = Replicas(model, torch.optim.SGD(model.parameters(), lr=0.1), ranks, every=3)
    for _ in range(7):
        assert replicas.step() is None
    assert [tensor.shape for tensor in ranks.sums] == [(2, 3), (2, 3)]
    assert all(tensor.dtype == torch.int64 for tensor in ranks.sums)


def test_sharded_parameters_are_refused() -> None:
    class FlatParameter(nn.Parameter):
        pass

    model = nn.Linear(3, 4)
    model.weight = FlatParameter(torch.zeros(4, 3))
    with pytest.raises(UnsupportedSetupError, match="the ranks hold parts, not copies"):
        Replicas(model)
