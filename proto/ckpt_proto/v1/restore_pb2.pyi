from ckpt_proto.v1 import common_pb2 as _common_pb2
from ckpt_proto.v1 import disk_pb2 as _disk_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetIndexRequest(_message.Message):
    __slots__ = ("url", "checkpoint", "ranks")
    URL_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    url: str
    checkpoint: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, url: _Optional[str] = ..., checkpoint: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class GetIndexResponse(_message.Message):
    __slots__ = ("id", "segments")
    ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    id: _common_pb2.CheckpointId
    segments: _containers.RepeatedCompositeFieldContainer[_disk_pb2.SegmentIndex]
    def __init__(self, id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., segments: _Optional[_Iterable[_Union[_disk_pb2.SegmentIndex, _Mapping]]] = ...) -> None: ...

class ReadTensorRequest(_message.Message):
    __slots__ = ("url", "checkpoint", "name", "box")
    URL_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BOX_FIELD_NUMBER: _ClassVar[int]
    url: str
    checkpoint: str
    name: str
    box: _disk_pb2.BoxRecord
    def __init__(self, url: _Optional[str] = ..., checkpoint: _Optional[str] = ..., name: _Optional[str] = ..., box: _Optional[_Union[_disk_pb2.BoxRecord, _Mapping]] = ...) -> None: ...

class ReadTensorHeader(_message.Message):
    __slots__ = ("id", "dtype", "shape", "global_shape", "nbytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_SHAPE_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    id: _common_pb2.CheckpointId
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    global_shape: _containers.RepeatedScalarFieldContainer[int]
    nbytes: int
    def __init__(self, id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., global_shape: _Optional[_Iterable[int]] = ..., nbytes: _Optional[int] = ...) -> None: ...

class ReadChunksRequest(_message.Message):
    __slots__ = ("url", "checkpoint", "rank", "chunks")
    URL_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    url: str
    checkpoint: str
    rank: int
    chunks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, url: _Optional[str] = ..., checkpoint: _Optional[str] = ..., rank: _Optional[int] = ..., chunks: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadChunksHeader(_message.Message):
    __slots__ = ("id", "nbytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    id: _common_pb2.CheckpointId
    nbytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., nbytes: _Optional[_Iterable[int]] = ...) -> None: ...
