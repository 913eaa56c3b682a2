"""Numerics flags and versions: all are read, none can fail a save, each difference is one warning."""

from __future__ import annotations

import logging
import subprocess
import sys

import numpy as np
import pytest
import torch

from ckpt_trainer_hooks.environment import compare_environment, environment

WANTED = {
    "ckpt",
    "python",
    "numpy",
    "torch",
    "default_dtype",
    "deterministic_algorithms",
    "float32_matmul_precision",
    "cuda_matmul_allow_tf32",
    "cudnn_allow_tf32",
    "cudnn_benchmark",
    "cudnn_deterministic",
    "CUBLAS_WORKSPACE_CONFIG",
}


def test_flags_versions_and_variables_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    found = environment()
    assert found.keys() >= WANTED
    assert found["numpy"] == np.__version__
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert found["cudnn_benchmark"] == "True"
    assert all(isinstance(value, str) for value in found.values())


def test_each_difference_is_one_warning_with_both_values(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    saved = environment()
    assert compare_environment(saved) == []
    assert caplog.records == []
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    saved |= {"torch": "1.0", "of_a_later_version": "x", "cudnn_benchmark": "unknown"}
    with caplog.at_level(logging.WARNING):
        assert compare_environment(saved) == ["NCCL_ALGO", "torch"]
    text = [record.getMessage() for record in caplog.records]
    assert len(text) == 2
    assert "not set" in text[0]
    assert "Ring" in text[0]
    assert "1.0" in text[1]
    assert torch.__version__ in text[1]


def test_the_precision_flags_of_later_torch_do_not_break_a_save() -> None:
    # In a process of its own: once they are set, torch raises where the older flags are read, for good.
    program = (
        "import torch; from ckpt_trainer_hooks.environment import environment; "
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'; found = environment(); "
        "print(found['cuda_matmul_fp32_precision'], found['float32_matmul_precision'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "tf32"
