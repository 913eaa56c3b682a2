from ckpt_proto.v1 import common_pb2 as _common_pb2
from ckpt_proto.v1 import staging_pb2 as _staging_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OfferRequest(_message.Message):
    __slots__ = ("config", "owner", "id", "rank", "index", "layout")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    config: _staging_pb2.RunConfig
    owner: _common_pb2.PeerNode
    id: _common_pb2.CheckpointId
    rank: int
    index: bytes
    layout: bytes
    def __init__(self, config: _Optional[_Union[_staging_pb2.RunConfig, _Mapping]] = ..., owner: _Optional[_Union[_common_pb2.PeerNode, _Mapping]] = ..., id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., rank: _Optional[int] = ..., index: _Optional[bytes] = ..., layout: _Optional[bytes] = ...) -> None: ...

class OfferResponse(_message.Message):
    __slots__ = ("wanted_chunks",)
    WANTED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    wanted_chunks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, wanted_chunks: _Optional[_Iterable[int]] = ...) -> None: ...

class ReplicateHeader(_message.Message):
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

class GreetRequest(_message.Message):
    __slots__ = ("run_key", "caller", "committed", "ended")
    RUN_KEY_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    run_key: str
    caller: _common_pb2.PeerNode
    committed: _containers.RepeatedCompositeFieldContainer[_common_pb2.CheckpointId]
    ended: bool
    def __init__(self, run_key: _Optional[str] = ..., caller: _Optional[_Union[_common_pb2.PeerNode, _Mapping]] = ..., committed: _Optional[_Iterable[_Union[_common_pb2.CheckpointId, _Mapping]]] = ..., ended: bool = ...) -> None: ...

class GreetResponse(_message.Message):
    __slots__ = ("node", "held")
    NODE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    node: _common_pb2.PeerNode
    held: _containers.RepeatedCompositeFieldContainer[HeldReplicas]
    def __init__(self, node: _Optional[_Union[_common_pb2.PeerNode, _Mapping]] = ..., held: _Optional[_Iterable[_Union[HeldReplicas, _Mapping]]] = ...) -> None: ...

class HeldReplicas(_message.Message):
    __slots__ = ("id", "ranks")
    ID_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    id: _common_pb2.CheckpointId
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...
