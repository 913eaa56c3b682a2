"""Every private torch name that the hooks touch, behind one import.

Each function says what is relied on, so that a new torch release is checked in one file.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = [
    "as_dtensor",
    "default_store",
    "flatten_wrapper",
    "inside_pipeline_schedule",
    "is_wrapper_step",
    "local_tensor",
    "mesh_ranks",
    "root_mesh",
    "strided_split_factor",
    "version_of",
]

_SCHEDULES = "torch.distributed.pipelining.schedules"


def as_dtensor(tensor: torch.Tensor) -> DTensor | None:
    """Return ``tensor`` as a DTensor, or None. Imports the DTensor module only where it is in use."""
    if type(tensor) is torch.Tensor or not dist.is_available():
        return None
    from torch.distributed.tensor import DTensor  # costs 0.3 s at import; plain runs never need it

    if isinstance(tensor, DTensor):
        return tensor
    data = tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor
    return data if isinstance(data, DTensor) else None


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """The local shard without autograd and without the wait of an async collective.

    Private: ``DTensor._local_tensor`` (``to_local()`` costs 20 times more and builds a graph node).
    """
    return tensor._local_tensor


def flatten_wrapper(tensor: torch.Tensor) -> tuple[list[str], Any] | None:
    """Return (names of the inner tensors, context) of a traceable wrapper subclass; None: it is none.

    Private: ``torch.utils._python_dispatch.is_traceable_wrapper_subclass``; the methods are its protocol.
    """
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if not is_traceable_wrapper_subclass(tensor):
        return None
    names, context = tensor.__tensor_flatten__()
    return list(names), context


def mesh_ranks(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[str, ...], list[int]]:
    """Return (shape, dim names or empty, row-major global ranks) of a mesh."""
    ranks = mesh.mesh
    return tuple(ranks.shape), tuple(mesh.mesh_dim_names or ()), ranks.flatten().tolist()


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that ``mesh`` was sliced from, or ``mesh`` itself.

    Private: ``DeviceMesh._get_root_mesh``; without it every mesh is its own root.
    """
    get = getattr(mesh, "_get_root_mesh", None)
    root: DeviceMesh = mesh if get is None else get()
    return root


def strided_split_factor(placement: object) -> int | None:
    """Return the split factor of FSDP2's ``_StridedShard``, or None for any other placement."""
    if type(placement).__name__ != "_StridedShard":
        return None
    return int(placement.split_factor)  # type: ignore[attr-defined]


def version_of(tensor: torch.Tensor) -> int:
    """The in-place version counter of autograd; -1 for inference tensors, which have none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def default_store() -> Store:
    """The key-value store of the default process group.

    Private: ``distributed_c10d._get_default_store``.
    """
    from torch.distributed import distributed_c10d

    store: Store = distributed_c10d._get_default_store()
    return store


def inside_pipeline_schedule() -> bool:
    """Whether a schedule of ``torch.distributed.pipelining`` is running further up this thread's stack.

    Not seen: a hook that autograd calls on a thread of its own (backward on CUDA).
    """
    if _SCHEDULES not in sys.modules:
        return False
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == _SCHEDULES:
            return True
    return False


def is_wrapper_step(module: torch.nn.Module, child: str) -> bool:
    """Return whether going from ``module`` to its child ``child`` only unwraps a wrapper.

    Wrappers by type, never by name: DDP's ``module``, torch.compile's ``_orig_mod`` and activation
    checkpointing's ``_checkpoint_wrapped_module``. A user's own attribute of such a name stays in the FQN.
    Base classes count, because ``fully_shard`` gives a wrapper a class derived from its own.
    """
    if child == "module":
        return isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel)
    if child == "_orig_mod":
        return _is_a(module, "OptimizedModule")
    if child == "_checkpoint_wrapped_module":
        return _is_a(module, "CheckpointWrapper", "OffloadWrapper")
    return False


def _is_a(module: torch.nn.Module, *names: str) -> bool:
    return any(cls.__name__ in names for cls in type(module).__mro__)
