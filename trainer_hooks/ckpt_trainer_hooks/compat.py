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
    "PLAIN_TENSORS",
    "WRAPPER_CHILDREN",
    "as_dtensor",
    "collective_sequence",
    "default_store",
    "flatten_wrapper",
    "fsdp_groups",
    "fsdp_parameters",
    "gradient_device",
    "inside_pipeline_schedule",
    "is_fsdp1",
    "is_wrapper_step",
    "local_tensor",
    "mesh_ranks",
    "partial_reduction",
    "plain_paths",
    "root_mesh",
    "set_partial_reduction",
    "set_unsharded_gradient",
    "stores_plainly",
    "strided_split_factor",
    "unsharded_gradient",
    "unsharded_mesh",
    "version_of",
]

_SCHEDULES = "torch.distributed.pipelining.schedules"

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that are no subclass of anybody's; compared by identity, a subclass is not among them."""

WRAPPER_CHILDREN = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Names of children that may be no more than what a wrapper wraps; see :func:`is_wrapper_step`."""


def as_dtensor(tensor: torch.Tensor) -> DTensor | None:
    """Return ``tensor`` as a DTensor, or None. Imports the DTensor module only where it is in use.

    A parameter that is a DTensor has that class; ``torch.nn.Parameter`` itself is only over plain tensors.
    """
    if type(tensor) in PLAIN_TENSORS or not dist.is_available():
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


def collective_sequence() -> int:
    """How many collectives this rank has begun in the default process group; 0 where that is not known.

    Private: ``ProcessGroup._get_sequence_number_for_group``. Safe from any thread.
    """
    from torch.distributed import distributed_c10d

    try:
        group: Any = distributed_c10d._get_default_group()
        return int(group._get_sequence_number_for_group())
    except (ValueError, RuntimeError, AttributeError):  # no group, or a backend without numbers
        return 0


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


def plain_paths(root: torch.nn.Module) -> list[tuple[str, torch.nn.Module]] | None:
    """Every (prefix of names, module) under ``root``, as ``named_modules(remove_duplicate=False)`` has them.

    None where a class names its parts in a way of its own; torch's methods have to be asked then. A fifth of
    their time, because they nest a generator per level.

    Private: ``Module._modules``, ``_parameters``, ``_buffers`` and ``_named_members``, and that
    ``named_modules``, ``named_parameters`` and ``named_buffers`` are made of these.
    """
    kind = type(root)
    if any(
        getattr(kind, name) is not getattr(torch.nn.Module, name) or name in vars(root) for name in _NAMING
    ):
        return None
    found: list[tuple[str, torch.nn.Module]] = []
    return found if _collect("", root, found) else None


_NAMING = ("named_parameters", "named_buffers", "_named_members")


def _collect(prefix: str, module: torch.nn.Module, found: list[tuple[str, torch.nn.Module]]) -> bool:
    children = module._modules
    if type(module).named_modules is not torch.nn.Module.named_modules or not isinstance(children, dict):
        return False
    found.append((prefix, module))
    return all(
        child is None or _collect(f"{prefix}{name}.", child, found) for name, child in children.items()
    )


def stores_plainly(module: torch.nn.Module) -> bool:
    """Whether ``module`` adds its parameters and persistent buffers to a state dict, and does no more.

    Private: ``Module._save_to_state_dict``, ``_state_dict_hooks``, ``_state_dict_pre_hooks``,
    ``_non_persistent_buffers_set``.
    """
    kind, own = type(module), vars(module)
    return (
        kind.state_dict is torch.nn.Module.state_dict
        and kind._save_to_state_dict is torch.nn.Module._save_to_state_dict
        and kind.get_extra_state is torch.nn.Module.get_extra_state
        and not module._state_dict_hooks
        and not module._state_dict_pre_hooks
        and own.keys().isdisjoint(_STORING)
    )


_STORING = ("state_dict", "_save_to_state_dict", "get_extra_state")


def is_fsdp1(module: torch.nn.Module) -> bool:
    """Whether the module is FSDP1's wrapper. By name: a program without it need not import it."""
    return _is_a(module, "FullyShardedDataParallel")


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
    if child == "_fsdp_wrapped_module":
        return is_fsdp1(module)
    return False


def fsdp_groups(root: torch.nn.Module) -> list[Any]:
    """The parameter groups of every module under ``root`` that ``fully_shard`` was called on, in order.

    Private: ``FSDPModule._get_fsdp_state()``, its ``_fsdp_param_groups`` (one ``_fsdp_param_group`` in older
    releases).
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # whoever calls fully_shard has imported it
    if fsdp is None or not hasattr(fsdp, "FSDPModule"):
        return []
    groups: dict[int, Any] = {}
    for module in root.modules():
        if isinstance(module, fsdp.FSDPModule):
            state = module._get_fsdp_state()
            found = getattr(state, "_fsdp_param_groups", None)
            for group in [state._fsdp_param_group] if found is None else found:
                if group is not None:
                    groups[id(group)] = group
    return list(groups.values())


def fsdp_parameters(group: Any) -> list[tuple[torch.nn.Module, str, Any]]:
    """(module, name in it, FSDPParam) of each parameter of a group; a tied one under its first name.

    Private: ``FSDPParamGroup.fsdp_params``, ``FSDPParam._module_info``, ``.sharded_param``.
    """
    return [(param._module_info.module, param._module_info.param_name, param) for param in group.fsdp_params]


def unsharded_gradient(param: Any) -> torch.Tensor | None:
    """The sum of the backward passes that were not reduced: full size, different on every rank.

    Private: ``FSDPParam.unsharded_accumulated_grad`` where gradients are reduced in another dtype, else the
    ``grad`` of ``FSDPParam._unsharded_param``, which exists from the first forward on.
    """
    found: torch.Tensor | None = param.unsharded_accumulated_grad
    if found is None and hasattr(param, "_unsharded_param"):
        found = param._unsharded_param.grad
    return found


def set_unsharded_gradient(param: Any, gradient: torch.Tensor | None) -> None:
    """Make ``gradient`` what the next backward adds to.

    Always in ``unsharded_accumulated_grad``: there is no unsharded parameter before the first forward. FSDP
    adds to it in place, as autograd would to ``grad``, so the bits are the same.
    """
    param.unsharded_accumulated_grad = gradient
    if hasattr(param, "_unsharded_param"):
        param._unsharded_param.grad = None


def unsharded_mesh(param: Any) -> DeviceMesh | None:
    """The mesh of an unsharded gradient that is a DTensor (FSDP2 over TP), or None.

    Private: ``FSDPParam._unsharded_dtensor_spec``, ``_tp_spec`` in older releases.
    """
    spec = getattr(param, "_unsharded_dtensor_spec", None) or getattr(param, "_tp_spec", None)
    return None if spec is None else spec.mesh


def gradient_device(owner: Any) -> torch.device:
    """Where an FSDPParam or FSDPParamGroup computes. Private: ``device`` of either."""
    device: torch.device = owner.device
    return device


def partial_reduction(group: Any) -> torch.Tensor | None:
    """HSDP without all-reduce: the sum of a whole group, reduced over the shards and not over the replicas.

    Private: ``FSDPParamGroup._partial_reduce_output``.
    """
    found: torch.Tensor | None = group._partial_reduce_output
    return found


def set_partial_reduction(group: Any, value: torch.Tensor | None) -> None:
    """Set what :func:`partial_reduction` returns."""
    group._partial_reduce_output = value


def _is_a(module: torch.nn.Module, *names: str) -> bool:
    return any(cls.__name__ in names for cls in type(module).__mro__)
