from ckpt_proto.v1 import common_pb2 as _common_pb2
from ckpt_proto.v1 import disk_pb2 as _disk_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HaveRequest(_message.Message):
    __slots__ = ("run_key", "id", "with_headers")
    RUN_KEY_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    WITH_HEADERS_FIELD_NUMBER: _ClassVar[int]
    run_key: str
    id: _common_pb2.CheckpointId
    with_headers: bool
    def __init__(self, run_key: _Optional[str] = ..., id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., with_headers: bool = ...) -> None: ...

class HaveResponse(_message.Message):
    __slots__ = ("checkpoints",)
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    checkpoints: _containers.RepeatedCompositeFieldContainer[HeldCheckpoint]
    def __init__(self, checkpoints: _Optional[_Iterable[_Union[HeldCheckpoint, _Mapping]]] = ...) -> None: ...

class HeldCheckpoint(_message.Message):
    __slots__ = ("id", "world_size", "is_committed", "segments", "run_id")
    ID_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    IS_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    id: _common_pb2.CheckpointId
    world_size: int
    is_committed: bool
    segments: _containers.RepeatedCompositeFieldContainer[HeldSegment]
    run_id: str
    def __init__(self, id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., world_size: _Optional[int] = ..., is_committed: bool = ..., segments: _Optional[_Iterable[_Union[HeldSegment, _Mapping]]] = ..., run_id: _Optional[str] = ...) -> None: ...

class HeldSegment(_message.Message):
    __slots__ = ("rank", "is_replica", "header")
    RANK_FIELD_NUMBER: _ClassVar[int]
    IS_REPLICA_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    rank: int
    is_replica: bool
    header: _disk_pb2.GroupHeader
    def __init__(self, rank: _Optional[int] = ..., is_replica: bool = ..., header: _Optional[_Union[_disk_pb2.GroupHeader, _Mapping]] = ...) -> None: ...

class GetSegmentRequest(_message.Message):
    __slots__ = ("run_key", "id", "rank", "with_layout")
    RUN_KEY_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WITH_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    run_key: str
    id: _common_pb2.CheckpointId
    rank: int
    with_layout: bool
    def __init__(self, run_key: _Optional[str] = ..., id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., rank: _Optional[int] = ..., with_layout: bool = ...) -> None: ...

class GetSegmentResponse(_message.Message):
    __slots__ = ("index", "layout")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    index: bytes
    layout: bytes
    def __init__(self, index: _Optional[bytes] = ..., layout: _Optional[bytes] = ...) -> None: ...

class ReadSegmentRequest(_message.Message):
    __slots__ = ("run_key", "id", "rank", "start", "nbytes")
    RUN_KEY_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    run_key: str
    id: _common_pb2.CheckpointId
    rank: int
    start: int
    nbytes: int
    def __init__(self, run_key: _Optional[str] = ..., id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., rank: _Optional[int] = ..., start: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...
