"""The arithmetic of the kernels in `move`, run by Triton's interpreter on the CPU.

`test_move.py` runs this file in a process of its own, because the interpreter is chosen when a kernel is defined.
"""

from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from undertow.errors import InvalidArgument
from undertow.kernels import move

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_with_index(tensor: Any, scope: Any) -> None:
    """Triton 3.6 takes `int()` of an array of shape [1], which NumPy 2.4 refuses."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_tensor_with_index

VECTOR = 16
BLOCK_BYTES = move.COPY_BLOCK * VECTOR


def noise(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("ctas", [1, 3])
@pytest.mark.parametrize("offset", [0, 16, 4, 3])
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 4099, BLOCK_BYTES, 2 * BLOCK_BYTES + 33])
def test_copy_moves_every_byte_and_no_other(size: int, offset: int, ctas: int) -> None:
    source = noise(size + offset)[offset:]
    whole = torch.full((size + offset + 64,), 0xA5, dtype=torch.uint8)
    move.copy(whole[32 : 32 + size], source, ctas)
    assert torch.equal(whole[32 : 32 + size], source)
    assert (whole[:32] == 0xA5).all()
    assert (whole[32 + size :] == 0xA5).all()


@pytest.mark.parametrize("offset", [1, 4])
def test_copy_to_an_unaligned_destination(offset: int) -> None:
    source, whole = noise(999), torch.zeros(1024, dtype=torch.uint8)
    move.copy(whole[offset : offset + 999], source, 2)
    assert torch.equal(whole[offset : offset + 999], source)
    assert whole[:offset].sum() + whole[offset + 999 :].sum() == 0


def test_copy_of_typed_rows() -> None:
    source = torch.randn(5, 7, dtype=torch.float32).to(torch.bfloat16)
    destination = torch.zeros(5, 7, dtype=torch.bfloat16)
    move.copy(destination, source, 4)
    assert torch.equal(destination, source)


@pytest.mark.parametrize("ctas", [1, 5])
@pytest.mark.parametrize("offset", [0, 4, 3])
@pytest.mark.parametrize(
    "sizes", [(), (40,), (17, 0), (4099, 1, 33), (16, 32, 48, 64), (2 * BLOCK_BYTES + 5, *range(90, 98))]
)
def test_several_copies_move_every_byte_and_no_other(sizes: tuple[int, ...], offset: int, ctas: int) -> None:
    sources = [noise(size + offset)[offset:] for size in sizes]
    whole = [torch.full((size + 64,), 0xA5, dtype=torch.uint8) for size in sizes]
    move.copy_all([(one[32:-32], source) for one, source in zip(whole, sources, strict=True)], ctas)
    for one, source in zip(whole, sources, strict=True):
        assert torch.equal(one[32:-32], source)
        assert (one[:32] == 0xA5).all()
        assert (one[-32:] == 0xA5).all()


def test_copy_refuses_what_it_cannot_do() -> None:
    with pytest.raises(InvalidArgument, match="destination is 3 bytes, but must be 4 bytes"):
        move.copy(torch.zeros(3, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8), 1)
    with pytest.raises(InvalidArgument, match="source is strided"):
        move.copy(torch.zeros(2, 2), torch.zeros(2, 2).t(), 1)
    with pytest.raises(InvalidArgument, match="ctas is 0"):
        move.copy(torch.zeros(4), torch.zeros(4), 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int32])
@pytest.mark.parametrize("count", [1, 1000, 2 * move.SUM_BLOCK + 5])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_sum_of_integers_is_exact(dtype: torch.dtype, count: int, ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    parts = torch.randint(-8, 9, (ranks, count), generator=generator).to(dtype)
    output = torch.full((count + 8,), 77).to(dtype)
    move.sum_parts(output[:count], parts, 2)
    assert torch.equal(output[:count], parts.double().sum(0).to(dtype))
    assert (output[count:] == 77).all()


def test_sum_accumulates_in_float32_in_rank_order() -> None:
    # 2048 + 1 is lost in float16 and kept in float32; 2^24 + 1 is lost in float32, so that the order shows.
    halves = torch.tensor([[2048.0], [1.0], [1.0]], dtype=torch.float16)
    output = torch.zeros(1, dtype=torch.float16)
    move.sum_parts(output, halves, 1)
    assert output.item() == 2050.0

    singles = torch.tensor([[1.0], [2.0**24], [-(2.0**24)]])
    output = torch.zeros(1)
    move.sum_parts(output, singles, 1)
    assert output.item() == 0.0  # (1 + 2^24) - 2^24, not 1 + (2^24 - 2^24)


def test_sum_of_spaced_and_unaligned_parts() -> None:
    space = torch.arange(4 * 1001, dtype=torch.int32).view(4, 1001)
    parts = space[:, 1:100]
    output = torch.zeros(99, dtype=torch.int32)
    move.sum_parts(output, parts, 3)
    assert torch.equal(output, parts.sum(0, dtype=torch.int32))


def test_sum_refuses_what_it_cannot_do() -> None:
    with pytest.raises(InvalidArgument, match=r"output is torch\.int64"):
        move.sum_parts(torch.zeros(3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64), 1)
    with pytest.raises(InvalidArgument, match=r"parts is torch\.float32 \(2, 4\)"):
        move.sum_parts(torch.zeros(3), torch.zeros(2, 4), 1)
    with pytest.raises(InvalidArgument, match="strided within a part"):
        move.sum_parts(torch.zeros(3), torch.zeros(2, 6)[:, ::2], 1)
