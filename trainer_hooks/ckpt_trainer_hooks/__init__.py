"""Checkpointing inside a PyTorch training loop."""

from ckpt.format.values import register_value_type
from ckpt_trainer_hooks.data import ResumableLoader, ResumableSampler
from ckpt_trainer_hooks.handle import SaveHandle
from ckpt_trainer_hooks.loading import load, load_into
from ckpt_trainer_hooks.local_state import declare_local_state
from ckpt_trainer_hooks.manager import CheckpointManager
from ckpt_trainer_hooks.policy import EveryNSteps, SaveDecisionPolicy
from ckpt_trainer_hooks.shards import ExplicitShards
from ckpt_trainer_hooks.stop_options import StopReason, StopTraining

__all__ = [
    "CheckpointManager",
    "EveryNSteps",
    "ExplicitShards",
    "ResumableLoader",
    "ResumableSampler",
    "SaveDecisionPolicy",
    "SaveHandle",
    "StopReason",
    "StopTraining",
    "declare_local_state",
    "load",
    "load_into",
    "register_value_type",
]
