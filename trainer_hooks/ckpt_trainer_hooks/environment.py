"""Versions, numerics flags and variables that decide which bits a step computes."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from functools import cache

import numpy as np
import torch
import torch.distributed as dist

import ckpt
from ckpt.events import event, get_logger

__all__ = ["compare_environment", "environment"]

_log = get_logger("restore")
_UNSET = "not set"
_UNKNOWN = "unknown"

_FLAGS: dict[str, Callable[[], object]] = {
    "default_dtype": torch.get_default_dtype,
    "default_device": torch.get_default_device,
    "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
    "fill_uninitialized_memory": lambda: torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    # The flags of 2.9 and later and the ones before: reading the latter raises once the former were set.
    "fp32_precision": lambda: torch.backends.fp32_precision,  # type: ignore[attr-defined]
    "cuda_matmul_fp32_precision": lambda: torch.backends.cuda.matmul.fp32_precision,
    "cudnn_conv_fp32_precision": lambda: torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
    "cudnn_rnn_fp32_precision": lambda: torch.backends.cudnn.rnn.fp32_precision,  # type: ignore[attr-defined]
    "float32_matmul_precision": torch.get_float32_matmul_precision,
    "cuda_matmul_allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "cudnn_allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
    "cuda_matmul_allow_fp16_reduction": lambda: (
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "cuda_matmul_allow_bf16_reduction": lambda: (
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "cudnn_benchmark": lambda: torch.backends.cudnn.benchmark,
    "cudnn_deterministic": lambda: torch.backends.cudnn.deterministic,
}

_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "PYTHONHASHSEED",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)


def environment(extra: Iterable[tuple[str, str]] = ()) -> dict[str, str]:
    """Return what a restore compares with its own, by name. Cheap; never raises.

    What cannot be read in this process is "unknown", a variable without value "not set"; versions of
    libraries that are not there are left out.
    """
    found = dict(_versions())
    found.update((name, _read(flag)) for name, flag in _FLAGS.items())
    found.update((name, os.environ.get(name, _UNSET)) for name in _VARIABLES)
    if torch.cuda.is_initialized():  # first: is_available() asks the driver, 0.1 ms at every save
        found["gpu"] = torch.cuda.get_device_name()
    found.update(extra)
    return found


def compare_environment(saved: Mapping[str, str]) -> list[str]:
    """Warn once for each name that both know with different values; return these names.

    What could not be read on one of the sides is not compared.
    """
    now = environment()
    differ = [
        name
        for name in sorted(saved.keys() & now.keys())
        if saved[name] != now[name] and _UNKNOWN not in (saved[name], now[name])
    ]
    for name in differ:
        event(
            _log,
            logging.WARNING,
            "restore.environment_differs",
            name=name,
            saved=saved[name],
            now=now[name],
        )
    return differ


@cache
def _versions() -> dict[str, str]:
    found = {
        "ckpt": ckpt.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "numpy": np.__version__,
        "torch": torch.__version__,
    }
    probes: dict[str, Callable[[], object]] = {
        "cuda": lambda: torch.version.cuda,
        "rocm": lambda: torch.version.hip,
        "cudnn": lambda: torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "nccl": _nccl_version,
    }
    for name, probe in probes.items():
        value = _read(probe)
        if value not in ("None", _UNKNOWN):
            found[name] = value
    return found


def _nccl_version() -> str | None:
    if not (dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()):
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _read(flag: Callable[[], object]) -> str:
    try:
        return str(flag())
    except (AttributeError, RuntimeError, AssertionError, OSError):
        return _UNKNOWN
