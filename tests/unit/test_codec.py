"""Chunk codecs: every codec gives the bytes back, never more than was promised, and never grows a chunk."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import CorruptError, InvalidInputError
from ckpt.format.codec import CODECS, decode_chunk, encode_chunk
from ckpt_proto.v1 import disk_pb2


@given(st.sampled_from(CODECS), st.binary(min_size=1, max_size=300), st.integers(1, 50))
def test_every_codec_gives_the_bytes_back(codec: int, piece: bytes, times: int) -> None:
    data = piece * times
    used, stored = encode_chunk(codec, data)
    assert used in (codec, disk_pb2.CODEC_RAW)
    assert len(stored) <= len(data)
    assert bytes(decode_chunk(used, stored, len(data))) == data


def test_grouping_compresses_floats_better_and_noise_is_stored_raw() -> None:
    weights = np.random.default_rng(1).normal(0, 0.02, 100_000).astype("<f4").tobytes()
    plain, grouped = (
        len(encode_chunk(codec, weights)[1])
        for codec in (disk_pb2.CODEC_ZSTD, disk_pb2.CODEC_ZSTD_BYTEGROUP4)
    )
    assert grouped < plain
    noise = np.random.default_rng(1).bytes(10_000)
    used, stored = encode_chunk(disk_pb2.CODEC_ZSTD, noise)
    assert (used, stored) == (disk_pb2.CODEC_RAW, noise)


def test_raw_chunks_are_not_copied() -> None:
    data = bytearray(b"abc")
    assert encode_chunk(disk_pb2.CODEC_RAW, data)[1] is data
    assert decode_chunk(disk_pb2.CODEC_RAW, data, 3) is data


@pytest.mark.parametrize("codec", [disk_pb2.CODEC_RAW, disk_pb2.CODEC_ZSTD, disk_pb2.CODEC_ZSTD_BYTEGROUP2])
@pytest.mark.parametrize("claimed", [99, 101])
def test_a_chunk_of_another_size_than_promised_is_corrupt(codec: int, claimed: int) -> None:
    used, stored = encode_chunk(codec, b"x" * 100)
    with pytest.raises(CorruptError) as caught:
        decode_chunk(used, stored, claimed)
    assert caught.value.code == "codec"


def test_damaged_frames_and_unknown_codecs_are_corrupt() -> None:
    _, stored = encode_chunk(disk_pb2.CODEC_ZSTD, b"x" * 100)
    bomb = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(50 << 20))
    cases = [
        (disk_pb2.CODEC_ZSTD, b"not zstd"),
        (disk_pb2.CODEC_ZSTD, b""),
        (disk_pb2.CODEC_ZSTD, bytes(stored)[:-3]),
        (disk_pb2.CODEC_ZSTD, bomb),
        (77, b"x" * 100),
    ]
    for codec, data in cases:
        with pytest.raises(CorruptError) as caught:
            decode_chunk(codec, data, 100)
        assert caught.value.code == "codec"
    with pytest.raises(InvalidInputError):
        encode_chunk(77, b"x")
