from ckpt_proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_RAW: _ClassVar[Codec]
    CODEC_ZSTD: _ClassVar[Codec]
    CODEC_ZSTD_BYTEGROUP2: _ClassVar[Codec]
    CODEC_ZSTD_BYTEGROUP4: _ClassVar[Codec]
CODEC_RAW: Codec
CODEC_ZSTD: Codec
CODEC_ZSTD_BYTEGROUP2: Codec
CODEC_ZSTD_BYTEGROUP4: Codec

class BoxRecord(_message.Message):
    __slots__ = ("offsets", "sizes")
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, offsets: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class TensorEntry(_message.Message):
    __slots__ = ("name", "dtype", "shape", "start", "nbytes", "boxes", "global_shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    start: int
    nbytes: int
    boxes: _containers.RepeatedCompositeFieldContainer[BoxRecord]
    global_shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., start: _Optional[int] = ..., nbytes: _Optional[int] = ..., boxes: _Optional[_Iterable[_Union[BoxRecord, _Mapping]]] = ..., global_shape: _Optional[_Iterable[int]] = ...) -> None: ...

class ChunkTable(_message.Message):
    __slots__ = ("chunk_nbytes", "digests", "codecs", "objects", "offsets", "stored_nbytes", "object_keys", "keys", "key_ids")
    CHUNK_NBYTES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    STORED_NBYTES_FIELD_NUMBER: _ClassVar[int]
    OBJECT_KEYS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    KEY_IDS_FIELD_NUMBER: _ClassVar[int]
    chunk_nbytes: int
    digests: bytes
    codecs: _containers.RepeatedScalarFieldContainer[int]
    objects: _containers.RepeatedScalarFieldContainer[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    stored_nbytes: _containers.RepeatedScalarFieldContainer[int]
    object_keys: _containers.RepeatedScalarFieldContainer[str]
    keys: _containers.RepeatedScalarFieldContainer[int]
    key_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, chunk_nbytes: _Optional[int] = ..., digests: _Optional[bytes] = ..., codecs: _Optional[_Iterable[int]] = ..., objects: _Optional[_Iterable[int]] = ..., offsets: _Optional[_Iterable[int]] = ..., stored_nbytes: _Optional[_Iterable[int]] = ..., object_keys: _Optional[_Iterable[str]] = ..., keys: _Optional[_Iterable[int]] = ..., key_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class SegmentIndex(_message.Message):
    __slots__ = ("run", "id", "rank", "world_size", "group", "nbytes", "layout_digest", "tensors", "chunks", "state", "rank_state", "captured_at", "environment", "parent", "audit", "run_id")
    class EnvironmentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RANK_STATE_FIELD_NUMBER: _ClassVar[int]
    CAPTURED_AT_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run: str
    id: _common_pb2.CheckpointId
    rank: int
    world_size: int
    group: _common_pb2.NodeGroup
    nbytes: int
    layout_digest: bytes
    tensors: _containers.RepeatedCompositeFieldContainer[TensorEntry]
    chunks: ChunkTable
    state: _common_pb2.Value
    rank_state: _common_pb2.Value
    captured_at: float
    environment: _containers.ScalarMap[str, str]
    parent: _common_pb2.CheckpointId
    audit: ReplicaAudit
    run_id: str
    def __init__(self, run: _Optional[str] = ..., id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., group: _Optional[_Union[_common_pb2.NodeGroup, _Mapping]] = ..., nbytes: _Optional[int] = ..., layout_digest: _Optional[bytes] = ..., tensors: _Optional[_Iterable[_Union[TensorEntry, _Mapping]]] = ..., chunks: _Optional[_Union[ChunkTable, _Mapping]] = ..., state: _Optional[_Union[_common_pb2.Value, _Mapping]] = ..., rank_state: _Optional[_Union[_common_pb2.Value, _Mapping]] = ..., captured_at: _Optional[float] = ..., environment: _Optional[_Mapping[str, str]] = ..., parent: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., audit: _Optional[_Union[ReplicaAudit, _Mapping]] = ..., run_id: _Optional[str] = ...) -> None: ...

class ReplicaAudit(_message.Message):
    __slots__ = ("shift", "own", "other")
    SHIFT_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    shift: int
    own: bytes
    other: bytes
    def __init__(self, shift: _Optional[int] = ..., own: _Optional[bytes] = ..., other: _Optional[bytes] = ...) -> None: ...

class UploadRecord(_message.Message):
    __slots__ = ("object_key", "nbytes", "chunks")
    OBJECT_KEY_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    object_key: str
    nbytes: int
    chunks: ChunkTable
    def __init__(self, object_key: _Optional[str] = ..., nbytes: _Optional[int] = ..., chunks: _Optional[_Union[ChunkTable, _Mapping]] = ...) -> None: ...

class SegmentSummary(_message.Message):
    __slots__ = ("rank", "object_key", "nbytes", "layout_digest", "index_offset", "index_nbytes", "index_digest", "state_digest", "references", "has_explicit_boxes", "audit", "stored_nbytes", "pack")
    RANK_FIELD_NUMBER: _ClassVar[int]
    OBJECT_KEY_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    INDEX_OFFSET_FIELD_NUMBER: _ClassVar[int]
    INDEX_NBYTES_FIELD_NUMBER: _ClassVar[int]
    INDEX_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    HAS_EXPLICIT_BOXES_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    STORED_NBYTES_FIELD_NUMBER: _ClassVar[int]
    PACK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    object_key: str
    nbytes: int
    layout_digest: bytes
    index_offset: int
    index_nbytes: int
    index_digest: bytes
    state_digest: bytes
    references: _containers.RepeatedCompositeFieldContainer[_common_pb2.CheckpointId]
    has_explicit_boxes: bool
    audit: ReplicaAudit
    stored_nbytes: int
    pack: str
    def __init__(self, rank: _Optional[int] = ..., object_key: _Optional[str] = ..., nbytes: _Optional[int] = ..., layout_digest: _Optional[bytes] = ..., index_offset: _Optional[int] = ..., index_nbytes: _Optional[int] = ..., index_digest: _Optional[bytes] = ..., state_digest: _Optional[bytes] = ..., references: _Optional[_Iterable[_Union[_common_pb2.CheckpointId, _Mapping]]] = ..., has_explicit_boxes: bool = ..., audit: _Optional[_Union[ReplicaAudit, _Mapping]] = ..., stored_nbytes: _Optional[int] = ..., pack: _Optional[str] = ...) -> None: ...

class GroupHeader(_message.Message):
    __slots__ = ("run", "id", "group", "world_size", "segments", "written_at", "parent", "environment", "run_id")
    class EnvironmentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_AT_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run: str
    id: _common_pb2.CheckpointId
    group: _common_pb2.NodeGroup
    world_size: int
    segments: _containers.RepeatedCompositeFieldContainer[SegmentSummary]
    written_at: float
    parent: _common_pb2.CheckpointId
    environment: _containers.ScalarMap[str, str]
    run_id: str
    def __init__(self, run: _Optional[str] = ..., id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., group: _Optional[_Union[_common_pb2.NodeGroup, _Mapping]] = ..., world_size: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[SegmentSummary, _Mapping]]] = ..., written_at: _Optional[float] = ..., parent: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., environment: _Optional[_Mapping[str, str]] = ..., run_id: _Optional[str] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("run", "id", "write_id", "world_size", "group_count", "layout_digest", "groups_digest", "nbytes", "tensor_count", "has_explicit_boxes", "committed_at", "parent", "references", "environment", "state_ranks", "stored_nbytes", "run_id")
    class EnvironmentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    WRITE_ID_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUP_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    GROUPS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    TENSOR_COUNT_FIELD_NUMBER: _ClassVar[int]
    HAS_EXPLICIT_BOXES_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_AT_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    STATE_RANKS_FIELD_NUMBER: _ClassVar[int]
    STORED_NBYTES_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run: str
    id: _common_pb2.CheckpointId
    write_id: bytes
    world_size: int
    group_count: int
    layout_digest: bytes
    groups_digest: bytes
    nbytes: int
    tensor_count: int
    has_explicit_boxes: bool
    committed_at: float
    parent: _common_pb2.CheckpointId
    references: _containers.RepeatedCompositeFieldContainer[_common_pb2.CheckpointId]
    environment: _containers.ScalarMap[str, str]
    state_ranks: _containers.RepeatedScalarFieldContainer[int]
    stored_nbytes: int
    run_id: str
    def __init__(self, run: _Optional[str] = ..., id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., write_id: _Optional[bytes] = ..., world_size: _Optional[int] = ..., group_count: _Optional[int] = ..., layout_digest: _Optional[bytes] = ..., groups_digest: _Optional[bytes] = ..., nbytes: _Optional[int] = ..., tensor_count: _Optional[int] = ..., has_explicit_boxes: bool = ..., committed_at: _Optional[float] = ..., parent: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., references: _Optional[_Iterable[_Union[_common_pb2.CheckpointId, _Mapping]]] = ..., environment: _Optional[_Mapping[str, str]] = ..., state_ranks: _Optional[_Iterable[int]] = ..., stored_nbytes: _Optional[int] = ..., run_id: _Optional[str] = ...) -> None: ...

class Borrows(_message.Message):
    __slots__ = ("id", "base", "references")
    ID_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    id: _common_pb2.CheckpointId
    base: _common_pb2.CheckpointId
    references: _containers.RepeatedCompositeFieldContainer[_common_pb2.CheckpointId]
    def __init__(self, id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., base: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., references: _Optional[_Iterable[_Union[_common_pb2.CheckpointId, _Mapping]]] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("id", "object_keys")
    ID_FIELD_NUMBER: _ClassVar[int]
    OBJECT_KEYS_FIELD_NUMBER: _ClassVar[int]
    id: _common_pb2.CheckpointId
    object_keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., object_keys: _Optional[_Iterable[str]] = ...) -> None: ...
