from ckpt_proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunConfig(_message.Message):
    __slots__ = ("url", "store_options", "keep_local", "keep_last", "keep_every", "compression", "peers", "replication_factor", "replication_jump", "replication_rate")
    class StoreOptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    URL_FIELD_NUMBER: _ClassVar[int]
    STORE_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    KEEP_LOCAL_FIELD_NUMBER: _ClassVar[int]
    KEEP_LAST_FIELD_NUMBER: _ClassVar[int]
    KEEP_EVERY_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    REPLICATION_FACTOR_FIELD_NUMBER: _ClassVar[int]
    REPLICATION_JUMP_FIELD_NUMBER: _ClassVar[int]
    REPLICATION_RATE_FIELD_NUMBER: _ClassVar[int]
    url: str
    store_options: _containers.ScalarMap[str, str]
    keep_local: int
    keep_last: int
    keep_every: int
    compression: str
    peers: _containers.RepeatedCompositeFieldContainer[_common_pb2.PeerNode]
    replication_factor: int
    replication_jump: int
    replication_rate: int
    def __init__(self, url: _Optional[str] = ..., store_options: _Optional[_Mapping[str, str]] = ..., keep_local: _Optional[int] = ..., keep_last: _Optional[int] = ..., keep_every: _Optional[int] = ..., compression: _Optional[str] = ..., peers: _Optional[_Iterable[_Union[_common_pb2.PeerNode, _Mapping]]] = ..., replication_factor: _Optional[int] = ..., replication_jump: _Optional[int] = ..., replication_rate: _Optional[int] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("config", "staging_path", "staging_token")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    STAGING_PATH_FIELD_NUMBER: _ClassVar[int]
    STAGING_TOKEN_FIELD_NUMBER: _ClassVar[int]
    config: RunConfig
    staging_path: str
    staging_token: bytes
    def __init__(self, config: _Optional[_Union[RunConfig, _Mapping]] = ..., staging_path: _Optional[str] = ..., staging_token: _Optional[bytes] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("run_key", "shares_path", "conditional_put", "server_version")
    RUN_KEY_FIELD_NUMBER: _ClassVar[int]
    SHARES_PATH_FIELD_NUMBER: _ClassVar[int]
    CONDITIONAL_PUT_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    run_key: str
    shares_path: bool
    conditional_put: bool
    server_version: str
    def __init__(self, run_key: _Optional[str] = ..., shares_path: bool = ..., conditional_put: bool = ..., server_version: _Optional[str] = ...) -> None: ...

class SealRequest(_message.Message):
    __slots__ = ("run_key", "id", "rank", "index", "layout")
    RUN_KEY_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    run_key: str
    id: _common_pb2.CheckpointId
    rank: int
    index: bytes
    layout: bytes
    def __init__(self, run_key: _Optional[str] = ..., id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., rank: _Optional[int] = ..., index: _Optional[bytes] = ..., layout: _Optional[bytes] = ...) -> None: ...

class SealResponse(_message.Message):
    __slots__ = ("result", "wanted_chunks")
    class Result(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        RESULT_UNSPECIFIED: _ClassVar[SealResponse.Result]
        RESULT_ACCEPTED: _ClassVar[SealResponse.Result]
        RESULT_NEED_CHUNKS: _ClassVar[SealResponse.Result]
    RESULT_UNSPECIFIED: SealResponse.Result
    RESULT_ACCEPTED: SealResponse.Result
    RESULT_NEED_CHUNKS: SealResponse.Result
    RESULT_FIELD_NUMBER: _ClassVar[int]
    WANTED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    result: SealResponse.Result
    wanted_chunks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, result: _Optional[_Union[SealResponse.Result, str]] = ..., wanted_chunks: _Optional[_Iterable[int]] = ...) -> None: ...

class PutChunksHeader(_message.Message):
    __slots__ = ("run_key", "id", "rank", "chunks")
    RUN_KEY_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    run_key: str
    id: _common_pb2.CheckpointId
    rank: int
    chunks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run_key: _Optional[str] = ..., id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., rank: _Optional[int] = ..., chunks: _Optional[_Iterable[int]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("run_key",)
    RUN_KEY_FIELD_NUMBER: _ClassVar[int]
    run_key: str
    def __init__(self, run_key: _Optional[str] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("steps", "server_version", "oldest_pending_s", "embedded", "ranks", "draining", "replicated_bytes")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PENDING_S_FIELD_NUMBER: _ClassVar[int]
    EMBEDDED_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    REPLICATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[StepStatus]
    server_version: str
    oldest_pending_s: float
    embedded: bool
    ranks: _containers.RepeatedCompositeFieldContainer[RankHealth]
    draining: bool
    replicated_bytes: int
    def __init__(self, steps: _Optional[_Iterable[_Union[StepStatus, _Mapping]]] = ..., server_version: _Optional[str] = ..., oldest_pending_s: _Optional[float] = ..., embedded: bool = ..., ranks: _Optional[_Iterable[_Union[RankHealth, _Mapping]]] = ..., draining: bool = ..., replicated_bytes: _Optional[int] = ...) -> None: ...

class RankPulse(_message.Message):
    __slots__ = ("run_key", "attempt", "rank", "world_size", "cohort", "step", "phase", "still_s", "step_s", "phase_s", "busy_s", "collectives", "waits", "computes", "is_stopped", "where", "kernel", "stacks", "ended", "pid", "node", "spent_s")
    class Ended(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ENDED_UNSPECIFIED: _ClassVar[RankPulse.Ended]
        ENDED_CLOSED: _ClassVar[RankPulse.Ended]
        ENDED_DIED: _ClassVar[RankPulse.Ended]
    ENDED_UNSPECIFIED: RankPulse.Ended
    ENDED_CLOSED: RankPulse.Ended
    ENDED_DIED: RankPulse.Ended
    class PhaseSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class SpentSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_KEY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    COHORT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STILL_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    PHASE_S_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVES_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_FIELD_NUMBER: _ClassVar[int]
    IS_STOPPED_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SPENT_S_FIELD_NUMBER: _ClassVar[int]
    run_key: str
    attempt: int
    rank: int
    world_size: int
    cohort: str
    step: int
    phase: str
    still_s: float
    step_s: float
    phase_s: _containers.ScalarMap[str, float]
    busy_s: float
    collectives: int
    waits: bool
    computes: bool
    is_stopped: bool
    where: str
    kernel: str
    stacks: str
    ended: RankPulse.Ended
    pid: int
    node: str
    spent_s: _containers.ScalarMap[str, float]
    def __init__(self, run_key: _Optional[str] = ..., attempt: _Optional[int] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., cohort: _Optional[str] = ..., step: _Optional[int] = ..., phase: _Optional[str] = ..., still_s: _Optional[float] = ..., step_s: _Optional[float] = ..., phase_s: _Optional[_Mapping[str, float]] = ..., busy_s: _Optional[float] = ..., collectives: _Optional[int] = ..., waits: bool = ..., computes: bool = ..., is_stopped: bool = ..., where: _Optional[str] = ..., kernel: _Optional[str] = ..., stacks: _Optional[str] = ..., ended: _Optional[_Union[RankPulse.Ended, str]] = ..., pid: _Optional[int] = ..., node: _Optional[str] = ..., spent_s: _Optional[_Mapping[str, float]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankHealth(_message.Message):
    __slots__ = ("pulse", "age_s", "state", "reason")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[RankHealth.State]
        STATE_OK: _ClassVar[RankHealth.State]
        STATE_SLOW: _ClassVar[RankHealth.State]
        STATE_WAITING: _ClassVar[RankHealth.State]
        STATE_HUNG: _ClassVar[RankHealth.State]
        STATE_DEAD: _ClassVar[RankHealth.State]
        STATE_SILENT: _ClassVar[RankHealth.State]
        STATE_ENDED: _ClassVar[RankHealth.State]
    STATE_UNSPECIFIED: RankHealth.State
    STATE_OK: RankHealth.State
    STATE_SLOW: RankHealth.State
    STATE_WAITING: RankHealth.State
    STATE_HUNG: RankHealth.State
    STATE_DEAD: RankHealth.State
    STATE_SILENT: RankHealth.State
    STATE_ENDED: RankHealth.State
    PULSE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    pulse: RankPulse
    age_s: float
    state: RankHealth.State
    reason: str
    def __init__(self, pulse: _Optional[_Union[RankPulse, _Mapping]] = ..., age_s: _Optional[float] = ..., state: _Optional[_Union[RankHealth.State, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class StepStatus(_message.Message):
    __slots__ = ("run_key", "id", "state", "sealed_ranks", "group", "uploaded_bytes", "total_bytes", "error", "url", "warnings", "stored_bytes", "replicas", "replicas_wanted")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[StepStatus.State]
        STATE_SEALING: _ClassVar[StepStatus.State]
        STATE_UPLOADING: _ClassVar[StepStatus.State]
        STATE_UPLOADED: _ClassVar[StepStatus.State]
        STATE_COMMITTED: _ClassVar[StepStatus.State]
        STATE_FAILED: _ClassVar[StepStatus.State]
        STATE_ABANDONED: _ClassVar[StepStatus.State]
    STATE_UNSPECIFIED: StepStatus.State
    STATE_SEALING: StepStatus.State
    STATE_UPLOADING: StepStatus.State
    STATE_UPLOADED: StepStatus.State
    STATE_COMMITTED: StepStatus.State
    STATE_FAILED: StepStatus.State
    STATE_ABANDONED: StepStatus.State
    RUN_KEY_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SEALED_RANKS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    UPLOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_WANTED_FIELD_NUMBER: _ClassVar[int]
    run_key: str
    id: _common_pb2.CheckpointId
    state: StepStatus.State
    sealed_ranks: _containers.RepeatedScalarFieldContainer[int]
    group: _common_pb2.NodeGroup
    uploaded_bytes: int
    total_bytes: int
    error: _common_pb2.ErrorInfo
    url: str
    warnings: _containers.RepeatedCompositeFieldContainer[_common_pb2.ErrorInfo]
    stored_bytes: int
    replicas: _containers.RepeatedCompositeFieldContainer[SegmentReplicas]
    replicas_wanted: int
    def __init__(self, run_key: _Optional[str] = ..., id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., state: _Optional[_Union[StepStatus.State, str]] = ..., sealed_ranks: _Optional[_Iterable[int]] = ..., group: _Optional[_Union[_common_pb2.NodeGroup, _Mapping]] = ..., uploaded_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.ErrorInfo, _Mapping]] = ..., url: _Optional[str] = ..., warnings: _Optional[_Iterable[_Union[_common_pb2.ErrorInfo, _Mapping]]] = ..., stored_bytes: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[SegmentReplicas, _Mapping]]] = ..., replicas_wanted: _Optional[int] = ...) -> None: ...

class SegmentReplicas(_message.Message):
    __slots__ = ("rank", "nodes")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rank: _Optional[int] = ..., nodes: _Optional[_Iterable[str]] = ...) -> None: ...
