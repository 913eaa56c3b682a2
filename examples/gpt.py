"""A small GPT over characters, its training text, and the ways to split it over ranks.

The model is ordinary: nothing in this file knows about checkpoints. What makes it useful as a check is
that the global batch of a step is a pure function of (seed, step): it does not depend on how many ranks
share it, so the losses of different topologies agree up to the order of additions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "GPT",
    "KINDS",
    "TEXT",
    "GPTConfig",
    "TextStream",
    "data_shard",
    "global_mean",
    "make_mesh",
    "parallelize",
]

KINDS = ("none", "ddp", "fsdp2", "tp", "fsdp2+tp")
TEXT = Path(__file__).parent / "data" / "kjv-new-testament.txt"


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model. ``heads`` and ``hidden`` must be divisible by the tensor-parallel size.

    Attributes:
        vocab: number of different characters.
        context: longest sequence, in characters.
        dim: width of the residual stream.
        hidden: width inside the MLP.
        dropout: probability; above 0 the losses depend on the topology (each rank draws its own numbers).
    """

    vocab: int
    context: int = 64
    dim: int = 128
    heads: int = 4
    layers: int = 4
    hidden: int = 512
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal self-attention. A tensor-parallel rank has some of the heads, hence the ``-1`` in the views."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.dropout = config.dropout
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, config.dim, bias=False)
        self.wv = nn.Linear(config.dim, config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            w(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """Two linear layers with biases, GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, config.hidden)
        self.down = nn.Linear(config.hidden, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """One transformer layer, normalised before each half."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.dim)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Characters in, logits of the next character out: (batch, length) -> (batch, length, vocab)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.dim)
        self.positions = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.5 / math.sqrt(module.in_features))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class TextStream:
    """Batches of characters. A step's batch is a pure function of (seed, step): there is no position to save.

    Args:
        seed: two streams of one seed give the same batches.
        batch: sequences of the global batch; divisible by the number of data-parallel ranks.
        context: characters of one sequence.
    """

    def __init__(self, seed: int, batch: int, context: int, path: Path = TEXT) -> None:
        raw = np.frombuffer(path.read_bytes(), dtype=np.uint8)
        alphabet, codes = np.unique(raw, return_inverse=True)
        self.vocab = len(alphabet)
        self._codes = torch.from_numpy(codes.astype(np.int64))
        self._seed, self._batch, self._context = seed, batch, context

    def batch(self, step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
        """Return one rank's part of a step's batch: (inputs, targets), each (batch / size, context).

        Raises:
            ValueError: the batch is not divisible by ``size``.
        """
        if self._batch % size:
            raise ValueError(f"global batch {self._batch} is not divisible by {size} data-parallel ranks")
        rng = np.random.default_rng((self._seed, step))
        starts = rng.integers(0, len(self._codes) - self._context - 1, self._batch)
        share = self._batch // size
        rows = [self._codes[i : i + self._context + 1] for i in starts[rank * share : (rank + 1) * share]]
        block = torch.stack(rows)
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()


def make_mesh(kind: str, tp: int = 2) -> DeviceMesh | None:
    """Return the device mesh of ``kind`` over all ranks: dim ``dp``, ``tp`` or both; None for ``none``."""
    if kind == "none":
        return None
    world = dist.get_world_size()
    if kind == "tp":
        return init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    if kind == "fsdp2+tp":
        if world % tp:
            raise ValueError(f"{world} ranks are not divisible by --tp {tp}")
        return init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    return init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))


def data_shard(mesh: DeviceMesh | None) -> tuple[int, int]:
    """Return (data-parallel rank, number of data-parallel ranks)."""
    if mesh is None or "dp" not in (mesh.mesh_dim_names or ()):
        return 0, 1
    return mesh["dp"].get_local_rank(), mesh["dp"].size()


def global_mean(loss: Tensor, mesh: DeviceMesh | None) -> float:
    """Return the mean of ``loss`` over the data-parallel ranks (collective)."""
    total = loss.detach().to(torch.float64, copy=True)
    _, size = data_shard(mesh)
    if mesh is not None and size > 1:
        dist.all_reduce(total, group=mesh["dp"].get_group())
    return total.item() / size


def parallelize(model: GPT, mesh: DeviceMesh | None, kind: str) -> nn.Module:
    """Split ``model`` over ``mesh`` in place and return the module to train (DDP wraps it).

    Every rank must pass the same weights. The optimizer must be built afterwards.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; one of {', '.join(KINDS)}")
    if mesh is None:
        return model
    if kind == "ddp":
        return DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    if "tp" in kind:
        _tensor_parallel(model, mesh["tp"])
    if "fsdp2" in kind:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def _tensor_parallel(model: GPT, mesh: DeviceMesh) -> None:
    """Split attention by heads and the MLP by hidden units: one all-reduce for each, forward and backward."""
    if model.config.heads % mesh.size() or model.config.hidden % mesh.size():
        raise ValueError(f"heads and hidden units are not divisible by {mesh.size()} tensor-parallel ranks")
    plan = {
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
