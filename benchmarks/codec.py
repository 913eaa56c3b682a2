"""How small the state of a trained model becomes, exactly: stored bytes over raw, and the codec's speed.

A small GPT is trained on real text for a while, since untrained moments are zeros and prove nothing. Every
chunk-sized piece is stored as an upload with compression would store it, and read back for comparison.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from benchmarks.options import Options
from benchmarks.report import Report
from ckpt.format.codec import decode_chunk, encode_chunk
from ckpt.format.segment import CHUNK_NBYTES
from ckpt_proto.v1 import disk_pb2
from examples.gpt import GPT, GPTConfig, TextStream

__all__ = ["run", "trained_model", "trained_state"]

_KINDS = ("weights", "exp_avg", "exp_avg_sq")


def run(options: Options) -> Report:
    """One thread, every kind of tensor by itself and all together."""
    torch.set_num_threads(1)
    steps = options.repeats(quick=2, full=60)
    pieces = trained_state(steps, dim=64 if options.quick else 256)
    raw = {kind: len(data) for kind, data in pieces.items()}
    report = Report(
        "codec", f"fp32 GPT and AdamW after {steps} steps on text, {sum(raw.values()) >> 20} MiB, one thread"
    )
    stored, encode_s, decode_s = {}, 0.0, 0.0
    for kind, data in pieces.items():
        stored[kind], encoded, decoded = _store(data)
        encode_s, decode_s = encode_s + encoded, decode_s + decoded
    for kind in _KINDS:
        base = report.add(f"{kind}: raw", [raw[kind]], unit="bytes")
        report.add(f"{kind}: stored", [stored[kind]], unit="bytes", over=base, note="bytes as saved")
    base = report.add("whole state: raw", [sum(raw.values())], unit="bytes")
    report.add("whole state: stored", [sum(stored.values())], unit="bytes", over=base, bar="<= 0.85")
    rate = sum(raw.values()) / 1e6
    report.add("compress", [rate / encode_s], unit="MB/s", note="raw bytes per second")
    report.add("decompress", [rate / decode_s], unit="MB/s", note="raw bytes per second")
    return report


def trained_state(steps: int, *, dim: int) -> dict[str, bytes]:
    """Return the bytes of weights and moments of a GPT after ``steps`` steps on the example's text."""
    model, optimizer, _ = trained_model(steps, dim=dim)
    parameters = list(model.parameters())
    tensors = {"weights": [p.detach() for p in parameters]}
    for kind in _KINDS[1:]:
        tensors[kind] = [optimizer.state[p][kind] for p in parameters]
    return {kind: b"".join(t.numpy().tobytes() for t in each) for kind, each in tensors.items()}


def trained_model(steps: int, *, dim: int) -> tuple[GPT, torch.optim.Optimizer, Callable[[], None]]:
    """Return a GPT after ``steps`` steps on the example's text, its AdamW, and what makes one step more."""
    stream = TextStream(seed=0, batch=4, context=64)
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=stream.vocab, dim=dim, heads=dim // 32, layers=6, hidden=4 * dim))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    numbers = itertools.count()

    def step() -> None:
        inputs, targets = stream.batch(next(numbers), 0, 1)
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(steps):
        step()
    return model, optimizer, step


def _store(data: bytes) -> tuple[int, float, float]:
    """Return stored bytes, seconds to encode and seconds to decode, chunk by chunk."""
    stored, encode_s, decode_s = 0, 0.0, 0.0
    for start in range(0, len(data), CHUNK_NBYTES):
        chunk = data[start : start + CHUNK_NBYTES]
        began = time.perf_counter()
        codec, kept = encode_chunk(disk_pb2.CODEC_ZSTD_BYTEGROUP4, chunk)
        encode_s += time.perf_counter() - began
        began = time.perf_counter()
        back = decode_chunk(codec, kept, len(chunk))
        decode_s += time.perf_counter() - began
        if bytes(back) != chunk:
            raise RuntimeError("a chunk came back with other bytes")
        stored += len(kept)
    return stored, encode_s, decode_s
