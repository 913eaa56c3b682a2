from ckpt_proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TrainerMessage(_message.Message):
    __slots__ = ("arena", "flush", "close")
    ARENA_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    arena: Arena
    flush: Flush
    close: Close
    def __init__(self, arena: _Optional[_Union[Arena, _Mapping]] = ..., flush: _Optional[_Union[Flush, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ...) -> None: ...

class Arena(_message.Message):
    __slots__ = ("nbytes",)
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    nbytes: int
    def __init__(self, nbytes: _Optional[int] = ...) -> None: ...

class Flush(_message.Message):
    __slots__ = ("sequence", "id", "rank", "segment_nbytes", "index_offset", "index_nbytes", "layout_offset", "layout_nbytes", "layout_digest")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_NBYTES_FIELD_NUMBER: _ClassVar[int]
    INDEX_OFFSET_FIELD_NUMBER: _ClassVar[int]
    INDEX_NBYTES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_NBYTES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    id: _common_pb2.CheckpointId
    rank: int
    segment_nbytes: int
    index_offset: int
    index_nbytes: int
    layout_offset: int
    layout_nbytes: int
    layout_digest: bytes
    def __init__(self, sequence: _Optional[int] = ..., id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., rank: _Optional[int] = ..., segment_nbytes: _Optional[int] = ..., index_offset: _Optional[int] = ..., index_nbytes: _Optional[int] = ..., layout_offset: _Optional[int] = ..., layout_nbytes: _Optional[int] = ..., layout_digest: _Optional[bytes] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("wait",)
    WAIT_FIELD_NUMBER: _ClassVar[int]
    wait: bool
    def __init__(self, wait: bool = ...) -> None: ...

class FlusherEvent(_message.Message):
    __slots__ = ("state", "sequence", "id", "error", "seconds")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[FlusherEvent.State]
        STATE_SEALED: _ClassVar[FlusherEvent.State]
        STATE_COMMITTED: _ClassVar[FlusherEvent.State]
        STATE_FAILED: _ClassVar[FlusherEvent.State]
        STATE_WARNING: _ClassVar[FlusherEvent.State]
        STATE_REPLICATED: _ClassVar[FlusherEvent.State]
    STATE_UNSPECIFIED: FlusherEvent.State
    STATE_SEALED: FlusherEvent.State
    STATE_COMMITTED: FlusherEvent.State
    STATE_FAILED: FlusherEvent.State
    STATE_WARNING: FlusherEvent.State
    STATE_REPLICATED: FlusherEvent.State
    STATE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    state: FlusherEvent.State
    sequence: int
    id: _common_pb2.CheckpointId
    error: _common_pb2.ErrorInfo
    seconds: float
    def __init__(self, state: _Optional[_Union[FlusherEvent.State, str]] = ..., sequence: _Optional[int] = ..., id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.ErrorInfo, _Mapping]] = ..., seconds: _Optional[float] = ...) -> None: ...
