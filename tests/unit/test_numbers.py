"""Numbers of element types that NumPy lacks, against torch's own conversions: every bit pattern."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ckpt import dtypes
from ckpt.format.ids import CheckpointId
from ckpt.format.numbers import to_numbers
from ckpt.format.tensor_data import TensorData, numpy_dtype

FLOAT8 = [name for name in dtypes.known_dtypes() if name.startswith("float8_")]


@pytest.mark.parametrize("name", FLOAT8)
def test_every_float8_is_the_float32_that_torch_makes_of_it(name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(getattr(torch, name)).float().numpy()
    found = to_numbers(codes.numpy(), name)
    assert found.dtype == np.float32
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    finite = ~np.isnan(expected)
    assert np.array_equal(found[finite].view(np.uint32), expected[finite].view(np.uint32))


def test_every_bfloat16_is_the_float32_that_torch_makes_of_it() -> None:
    codes = np.arange(65536, dtype=np.uint16)
    expected = torch.from_numpy(codes).view(torch.bfloat16).float().numpy()
    assert np.array_equal(to_numbers(codes, "bfloat16").view(np.uint32), expected.view(np.uint32))


def test_complex_of_halves_and_packed_halves_of_bytes() -> None:
    bits = np.array([[1.5, 2.0, -0.25, -8.0]], np.float16).view(np.uint32)
    assert to_numbers(bits, "complex32").tolist() == [[1.5 + 2j, -0.25 - 8j]]
    values = to_numbers(np.array([0x10, 0x7F, 0x98], np.uint8), "float4_e2m1fn_x2")
    assert values.tolist() == [[0.0, 0.5], [-6.0, 6.0], [-0.0, -0.5]]
    assert np.signbit(values[2, 0])


def test_what_numpy_knows_and_what_is_bits_alone_stays() -> None:
    array = np.arange(4, dtype=np.float16)
    assert to_numbers(array, "float16") is array
    assert to_numbers(np.array([255], np.uint8), "int4").tolist() == [-1]
    assert to_numbers(np.array([255], np.uint8), "bits8").tolist() == [255]


@pytest.mark.parametrize("name", dtypes.known_dtypes())
def test_tensor_data_of_every_dtype_has_an_array_and_numbers(name: str) -> None:
    nbytes = 6 * dtypes.itemsize(name)
    tensor = TensorData(
        ident=CheckpointId(1, 1), dtype=name, shape=(2, 3), global_shape=(2, 3), data=bytearray(nbytes)
    )
    assert tensor.numpy().nbytes == nbytes
    assert tensor.numpy().dtype == numpy_dtype(name)
    assert not tensor.numbers().any() or name == "float8_e8m0fnu"  # it has no zero
