"""docs/format.md against the code: its example byte by byte, its tables, and its reader, which is run."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ckpt import dtypes
from ckpt.clock import random_bytes
from ckpt.digest import digest
from ckpt.format import chunks, codec, envelope, limits, segment, values
from ckpt.format.envelope import Kind
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import attempt_key, group_key, layout_key, manifest_key, run_key, segment_key
from ckpt.format.layout import (
    STRIPE_MIN_NBYTES,
    LayoutSet,
    Mesh,
    Replicate,
    Shard,
    StridedShard,
    TensorLayout,
    owned_region,
)
from ckpt.format.manifest import encode_manifest, open_manifest
from ckpt.format.values import encode_value
from ckpt.ops.attempts import Attempt
from ckpt.ops.catalog import latest, load_checkpoint
from ckpt.ops.commit import CommitState, try_commit
from ckpt.ops.fetch import fetch_tensor
from ckpt.ops.groups import put_group_index, put_layout
from ckpt.ops.verify import verify_deep
from ckpt.plan.save import plan_save
from ckpt.storage.base import Store
from ckpt.storage.local import LocalStore
from ckpt.storage.memory import MemoryStore
from ckpt_proto.v1 import common_pb2, disk_pb2
from tests.support.builders import FakeClock, build_checkpoint, build_segment, sample_layouts

DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"
IDENT = CheckpointId(7, 1)
DUMP_LINE = re.compile(r"([0-9a-f]{8})((?: +[0-9a-f]{2}){1,16})(?: +\|.*\|)?")
LAST_LINE = re.compile(r"[0-9a-f]{8}")


def document() -> str:
    return DOCUMENT.read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    """The fenced blocks of the document whose info string is ``kind``."""
    return re.findall(rf"^```{re.escape(kind)}\n(.*?)^```$", document(), re.MULTILINE | re.DOTALL)


def parse_dump(text: str) -> bytes:
    """Bytes of a dump as ``hexdump -C`` prints it; ``*``: the line before it goes on."""
    data = bytearray()
    repeats = False
    for line in text.splitlines():
        if line == "*":
            repeats = True
            continue
        found = DUMP_LINE.fullmatch(line)
        offset = int(line[:8], 16)
        while repeats and len(data) < offset:
            data += data[-16:]
        repeats = False
        assert len(data) == offset, line
        if found is None:
            assert LAST_LINE.fullmatch(line), line
            return bytes(data)
        data += bytes.fromhex(found[2])
    raise AssertionError("a dump ends with a line that has only its length")


def format_dump(data: bytes) -> str:
    """What :func:`parse_dump` reads; used to make the document."""
    lines: list[str] = []
    previous = b""
    for start in range(0, len(data), 16):
        piece = data[start : start + 16]
        if piece == previous and start + 16 < len(data):
            if lines[-1] != "*":
                lines.append("*")
            continue
        previous = piece
        halves = (" ".join(f"{byte:02x}" for byte in half) for half in (piece[:8], piece[8:]))
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in piece)
        lines.append(f"{start:08x}  {'  '.join(halves):<48}  |{text}|")
    return "\n".join([*lines, f"{len(data):08x}", ""])


def example_objects() -> dict[str, bytes]:
    """The objects of the document's example by key, in the order of their writing.

    The manifest's write id, which is random, is sixteen bytes 0xee.
    """
    mesh = Mesh.from_ranks((2,), ("dp",), (0, 1))
    layouts = LayoutSet(
        [
            TensorLayout("model.n", "int64", (), mesh, (Replicate(),)),
            TensorLayout("model.w", "float32", (3, 2), mesh, (Shard(0),)),
        ]
    )
    weight = np.arange(6, dtype="<f4").reshape(3, 2)
    tensors: Mapping[str, NDArray[Any]] = {"model.n": np.array(258, "<i8"), "model.w": weight}
    store = MemoryStore(f"memory://{random_bytes(8).hex()}/demo")
    attempt = Attempt(
        number=1,
        parent=None,
        world_size=2,
        host="node-0",
        started_at=1_800_000_000.0,
        claim_id="00112233445566778899aabbccddeeff",
    )
    store.put_new(attempt_key(1), attempt.to_json())
    indexes = [_put_example_segment(store, layouts, tensors, rank) for rank in (0, 1)]
    put_layout(store, layouts)
    put_group_index(store, indexes)
    assert try_commit(store, IDENT, clock=FakeClock(1_800_000_060.0)).state is CommitState.COMMITTED
    key = manifest_key(IDENT)
    manifest = open_manifest(store.get(key), IDENT, key=key)
    manifest.write_id = b"\xee" * 16
    keys = [attempt_key(1), *(segment_key(IDENT, rank) for rank in (0, 1))]
    keys += [layout_key(layouts.digest), group_key(IDENT, 0, 1)]
    return {**{name: store.get(name) for name in keys}, key: encode_manifest(manifest)}


def _put_example_segment(
    store: Store, layouts: LayoutSet, tensors: Mapping[str, NDArray[Any]], rank: int
) -> disk_pb2.SegmentIndex:
    data = bytes(build_segment(layouts, tensors, rank))
    key = segment_key(IDENT, rank)
    store.put(key, data)
    tree = {"items": {"model": {"kind": "module", "extra": {}}}, "aliases": {}}
    return disk_pb2.SegmentIndex(
        run="demo",
        id=IDENT.to_proto(),
        rank=rank,
        world_size=2,
        group=common_pb2.NodeGroup(index=0, count=1, ranks=[0, 1]),
        nbytes=len(data),
        layout_digest=layouts.digest,
        tensors=plan_save(layouts.values(), rank).tensor_entries(),
        chunks=disk_pb2.ChunkTable(
            chunk_nbytes=segment.CHUNK_NBYTES, digests=digest(data), object_keys=[key]
        ),
        state=encode_value(tree),
        captured_at=1_800_000_059.5,
        environment={"ckpt": "0.1.0"},
    )


def documented_example() -> dict[str, bytes]:
    """Key to bytes, as the document has them."""
    section = document().partition("\n## 13. ")[2].partition("\n## ")[0]
    pairs = re.findall(
        r"^`(\S+)` \(\d+ bytes\)\n\n```(hexdump|json)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL
    )
    return {key: parse_dump(text) if kind == "hexdump" else text.encode() for key, kind, text in pairs}


def test_example_is_what_the_code_writes() -> None:
    expected = example_objects()
    found = documented_example()
    assert list(found) == list(expected)
    for key, content in expected.items():
        assert found[key] == content, f"{key} is now:\n{format_dump(content)}"


def test_example_is_a_checkpoint_that_the_code_reads() -> None:
    store = MemoryStore(f"memory://{random_bytes(8).hex()}/demo")
    for key, content in documented_example().items():
        store.put(key, content)
    assert latest(store) == IDENT
    checkpoint = load_checkpoint(store, IDENT)
    assert verify_deep(checkpoint) == []
    dtype, shape, data = fetch_tensor(checkpoint, "model.w")
    assert (dtype, shape) == ("float32", (3, 2))
    assert bytes(data) == np.arange(6, dtype="<f4").tobytes()
    assert fetch_tensor(checkpoint, "model.n")[2] == (258).to_bytes(8, "little")


def load_reader() -> dict[str, Any]:
    (text,) = [block for block in blocks("python") if "def read_tensor" in block]
    assert "import ckpt" not in text
    assert "from ckpt" not in text
    names: dict[str, Any] = {"__name__": "reader"}
    exec(compile(text, str(DOCUMENT), "exec"), names)
    return names


def test_reader_prints_a_tensor_of_the_example(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    for key, data in documented_example().items():
        (run / key).parent.mkdir(parents=True, exist_ok=True)
        (run / key).write_bytes(data)
    script = tmp_path / "reader.py"
    script.write_text(next(block for block in blocks("python") if "def read_tensor" in block))
    command = [sys.executable, "-I", str(script), str(run), "model.w"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    (expected,) = [block for block in blocks("text") if block.startswith("model.w")]
    assert printed == expected


def many_layouts(world_size: int) -> LayoutSet:
    """Every kind of placement, uneven, with replicas above and below the striping threshold.

    Few elements: the reader handles them one by one.
    """
    flat = Mesh.from_ranks((world_size,), ("dp",), range(world_size))
    grid = Mesh.from_ranks((2, 2), ("dp", "tp"), (0, 1, 2, 3))
    odd = Mesh.from_ranks((2, 2), (), (3, 0, 2, 1))
    return LayoutSet(
        [
            *(item for name, item in sample_layouts(world_size).items() if name != "model.embedding"),
            TensorLayout("a.nested", "float32", (9, 3), grid, (Shard(0), Shard(0))),
            TensorLayout("a.strided", "float64", (9, 2), grid, (StridedShard(0, 2), Shard(0))),
            TensorLayout("a.both", "int16", (5, 7), odd, (Shard(1), Shard(0))),
            TensorLayout("a.hybrid", "complex128", (3, 44_001), grid, (Replicate(), Shard(1))),
            TensorLayout("a.wide", "complex128", (2, 33_001), flat, (Replicate(),)),
            TensorLayout("a.small", "int8", (3,), odd, (Replicate(), Replicate())),
            TensorLayout("a.empty", "float32", (0, 4), flat, (Shard(0),)),
        ]
    )


def test_reader_reads_every_placement_bit_for_bit(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    build_checkpoint(store, 10, world_size=4, group_size=3)
    built = build_checkpoint(store, 20, world_size=4, group_size=3, layouts=many_layouts(4))
    read: Callable[..., tuple[str, tuple[int, ...], bytes]] = load_reader()["read_tensor"]
    assert all(owned_region(built.layouts["a.wide"], rank) for rank in range(4)), "striped over all ranks"
    for name, layout in built.layouts.items():
        dtype, shape, data = read(tmp_path / "run", name)
        assert (dtype, tuple(shape)) == (layout.dtype, layout.global_shape), name
        assert data == built.tensors[name].tobytes(), name


def test_reader_follows_small_chunks_and_an_older_checkpoint(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    older = build_checkpoint(store, 10, world_size=3, chunk_nbytes=256)
    build_checkpoint(store, 20, world_size=3)
    read = load_reader()["read_tensor"]
    name = "model.weight"
    assert read(tmp_path / "run", name, str(older.ident))[2] == older.tensors[name].tobytes()


@pytest.mark.parametrize("kind", ["segment", "manifest", "index"])
def test_reader_refuses_damage(tmp_path: Path, kind: str) -> None:
    store = LocalStore(tmp_path / "run")
    built = build_checkpoint(store, 10)
    key = {
        "segment": segment_key(built.ident, 0),
        "manifest": manifest_key(built.ident),
        "index": group_key(built.ident, 0, 2),
    }[kind]
    path = tmp_path / "run" / key
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        load_reader()["read_tensor"](tmp_path / "run", "model.weight")


def table(heading: str) -> list[list[str]]:
    """The rows of the first table after ``heading``, without its head, markup of code removed."""
    text = document().partition(heading)[2]
    assert text, heading
    lines = re.findall(r"^\|.*\|$", text.partition("\n## ")[0], re.MULTILINE)
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_dtype_table_is_that_of_the_code() -> None:
    found = {row[0]: (int(row[1]), row[2]) for row in table("\n### 5.3 ")}
    expected = {
        name: (dtypes.itemsize(name), dtypes.SAFETENSORS_NAMES.get(name, "U8 + dimension"))
        for name in dtypes.known_dtypes()
    }
    assert found == expected


def test_kind_and_codec_tables_are_those_of_the_code() -> None:
    assert {int(row[0]): row[1] for row in table("\n### 3.2 ")} == {kind.value: kind.name for kind in Kind}
    assert {int(row[0]): row[1] for row in table("\n### 7.1 ")} == {
        number: disk_pb2.Codec.Name(number) for number in codec.CODECS
    }


def test_constants_are_those_of_the_code() -> None:
    found = {row[0]: row[1] for row in table("\n### 1.3 ")}
    assert {name: int(value.replace(" ", "")) for name, value in found.items()} == {
        "FORMAT_VERSION": envelope.FORMAT_VERSION,
        "CHUNK_NBYTES": segment.CHUNK_NBYTES,
        "DATA_ALIGN": segment.DATA_ALIGN,
        "MAX_HEADER_NBYTES": segment.MAX_HEADER_NBYTES,
        "STRIPE_MIN_NBYTES": STRIPE_MIN_NBYTES,
        "MAX_STEP": 999_999_999_999,
        "MAX_ATTEMPT": 999_999,
        "MAX_DEPTH": values.MAX_DEPTH,
        "MAX_CHUNK_NBYTES": limits.MAX_CHUNK_NBYTES,
        "MAX_NDIM": limits.MAX_NDIM,
        "MAX_WORLD_SIZE": limits.MAX_WORLD_SIZE,
        "MAX_SPLITS": limits.MAX_SPLITS,
    }


def test_keys_in_the_text_are_those_of_the_code() -> None:
    ident = CheckpointId(12000, 3)
    text = document()
    for key in (
        attempt_key(3),
        manifest_key(ident),
        segment_key(ident, 17),
        group_key(ident, 2, 12),
        run_key("s3://bucket/llama-8b"),
    ):
        assert f"`{key}`" in text, key


def test_byte_grouping_in_the_text_is_that_of_the_code() -> None:
    (text,) = [block for block in blocks("python") if "def group(" in block]
    names: dict[str, Any] = {}
    exec(compile(text, str(DOCUMENT), "exec"), names)
    data = bytes(range(256)) * 8 + b"xyz"  # compressible, with a rest
    for number, width in ((disk_pb2.CODEC_ZSTD_BYTEGROUP2, 2), (disk_pb2.CODEC_ZSTD_BYTEGROUP4, 4)):
        used, stored = codec.encode_chunk(number, data)
        assert used == number
        grouped = codec.decode_chunk(disk_pb2.CODEC_ZSTD, stored, len(data))
        assert bytes(grouped) == names["group"](data, width)
        assert names["ungroup"](bytes(grouped), width) == data


def test_a_chunk_table_without_lists_means_what_the_text_says() -> None:
    index = disk_pb2.SegmentIndex(nbytes=10)
    index.chunks.chunk_nbytes = 4
    index.chunks.digests = b"\0" * 48
    index.chunks.object_keys.append("data/00/x/y")
    last = chunks.stored_chunk(index, 2)
    assert (last.object_key, last.offset, last.nbytes, last.codec) == ("data/00/x/y", 8, 2, 0)
    assert math.ceil(10 / 4) == 3


if __name__ == "__main__":  # prints the example for the document
    for example_key, content in example_objects().items():
        sys.stdout.write(f"`{example_key}`\n\n{format_dump(content)}\n")
