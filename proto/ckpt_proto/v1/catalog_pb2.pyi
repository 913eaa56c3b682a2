from ckpt_proto.v1 import common_pb2 as _common_pb2
from ckpt_proto.v1 import disk_pb2 as _disk_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListRunsRequest(_message.Message):
    __slots__ = ("root",)
    ROOT_FIELD_NUMBER: _ClassVar[int]
    root: str
    def __init__(self, root: _Optional[str] = ...) -> None: ...

class ListRunsResponse(_message.Message):
    __slots__ = ("urls",)
    URLS_FIELD_NUMBER: _ClassVar[int]
    urls: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, urls: _Optional[_Iterable[str]] = ...) -> None: ...

class ListCheckpointsRequest(_message.Message):
    __slots__ = ("url", "page_size", "page_token", "with_copies")
    URL_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    WITH_COPIES_FIELD_NUMBER: _ClassVar[int]
    url: str
    page_size: int
    page_token: str
    with_copies: bool
    def __init__(self, url: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., with_copies: bool = ...) -> None: ...

class NodeCopies(_message.Message):
    __slots__ = ("node", "here", "ranks", "replica_ranks", "problem")
    NODE_FIELD_NUMBER: _ClassVar[int]
    HERE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_RANKS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    node: str
    here: bool
    ranks: _containers.RepeatedScalarFieldContainer[int]
    replica_ranks: _containers.RepeatedScalarFieldContainer[int]
    problem: _common_pb2.ErrorInfo
    def __init__(self, node: _Optional[str] = ..., here: bool = ..., ranks: _Optional[_Iterable[int]] = ..., replica_ranks: _Optional[_Iterable[int]] = ..., problem: _Optional[_Union[_common_pb2.ErrorInfo, _Mapping]] = ...) -> None: ...

class CheckpointInfo(_message.Message):
    __slots__ = ("id", "pinned", "committed_at", "manifest_nbytes", "location", "copies")
    ID_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_AT_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_NBYTES_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    id: _common_pb2.CheckpointId
    pinned: bool
    committed_at: float
    manifest_nbytes: int
    location: str
    copies: _containers.RepeatedCompositeFieldContainer[NodeCopies]
    def __init__(self, id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., pinned: bool = ..., committed_at: _Optional[float] = ..., manifest_nbytes: _Optional[int] = ..., location: _Optional[str] = ..., copies: _Optional[_Iterable[_Union[NodeCopies, _Mapping]]] = ...) -> None: ...

class ListCheckpointsResponse(_message.Message):
    __slots__ = ("checkpoints", "next_page_token", "latest", "latest_problem", "run_id")
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    LATEST_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    checkpoints: _containers.RepeatedCompositeFieldContainer[CheckpointInfo]
    next_page_token: str
    latest: _common_pb2.CheckpointId
    latest_problem: _common_pb2.ErrorInfo
    run_id: str
    def __init__(self, checkpoints: _Optional[_Iterable[_Union[CheckpointInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., latest: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., latest_problem: _Optional[_Union[_common_pb2.ErrorInfo, _Mapping]] = ..., run_id: _Optional[str] = ...) -> None: ...

class GetManifestRequest(_message.Message):
    __slots__ = ("url", "checkpoint", "manifest_only")
    URL_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_ONLY_FIELD_NUMBER: _ClassVar[int]
    url: str
    checkpoint: str
    manifest_only: bool
    def __init__(self, url: _Optional[str] = ..., checkpoint: _Optional[str] = ..., manifest_only: bool = ...) -> None: ...

class LocalCopy(_message.Message):
    __slots__ = ("rank", "path")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    rank: int
    path: str
    def __init__(self, rank: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

class GetManifestResponse(_message.Message):
    __slots__ = ("manifest", "layouts", "segments", "pinned", "local_copies", "copies", "foreign")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    LOCAL_COPIES_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    FOREIGN_FIELD_NUMBER: _ClassVar[int]
    manifest: _disk_pb2.Manifest
    layouts: _common_pb2.LayoutSet
    segments: _containers.RepeatedCompositeFieldContainer[_disk_pb2.SegmentSummary]
    pinned: bool
    local_copies: _containers.RepeatedCompositeFieldContainer[LocalCopy]
    copies: _containers.RepeatedCompositeFieldContainer[NodeCopies]
    foreign: _common_pb2.ErrorInfo
    def __init__(self, manifest: _Optional[_Union[_disk_pb2.Manifest, _Mapping]] = ..., layouts: _Optional[_Union[_common_pb2.LayoutSet, _Mapping]] = ..., segments: _Optional[_Iterable[_Union[_disk_pb2.SegmentSummary, _Mapping]]] = ..., pinned: bool = ..., local_copies: _Optional[_Iterable[_Union[LocalCopy, _Mapping]]] = ..., copies: _Optional[_Iterable[_Union[NodeCopies, _Mapping]]] = ..., foreign: _Optional[_Union[_common_pb2.ErrorInfo, _Mapping]] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("url", "checkpoint", "pinned")
    URL_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    url: str
    checkpoint: str
    pinned: bool
    def __init__(self, url: _Optional[str] = ..., checkpoint: _Optional[str] = ..., pinned: bool = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: _common_pb2.CheckpointId
    def __init__(self, id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ...) -> None: ...

class PruneRequest(_message.Message):
    __slots__ = ("url", "keep_last", "keep_every", "dry_run", "checkpoints")
    URL_FIELD_NUMBER: _ClassVar[int]
    KEEP_LAST_FIELD_NUMBER: _ClassVar[int]
    KEEP_EVERY_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    url: str
    keep_last: int
    keep_every: int
    dry_run: bool
    checkpoints: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, url: _Optional[str] = ..., keep_last: _Optional[int] = ..., keep_every: _Optional[int] = ..., dry_run: bool = ..., checkpoints: _Optional[_Iterable[str]] = ...) -> None: ...

class PruneVerdict(_message.Message):
    __slots__ = ("id", "keep", "reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    id: _common_pb2.CheckpointId
    keep: bool
    reason: str
    def __init__(self, id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., keep: bool = ..., reason: _Optional[str] = ...) -> None: ...

class PruneResponse(_message.Message):
    __slots__ = ("verdicts", "deleted_objects", "held", "freed")
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    DELETED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    FREED_FIELD_NUMBER: _ClassVar[int]
    verdicts: _containers.RepeatedCompositeFieldContainer[PruneVerdict]
    deleted_objects: int
    held: _containers.RepeatedCompositeFieldContainer[_common_pb2.CheckpointId]
    freed: _containers.RepeatedCompositeFieldContainer[_common_pb2.CheckpointId]
    def __init__(self, verdicts: _Optional[_Iterable[_Union[PruneVerdict, _Mapping]]] = ..., deleted_objects: _Optional[int] = ..., held: _Optional[_Iterable[_Union[_common_pb2.CheckpointId, _Mapping]]] = ..., freed: _Optional[_Iterable[_Union[_common_pb2.CheckpointId, _Mapping]]] = ...) -> None: ...

class SweepRequest(_message.Message):
    __slots__ = ("url", "older_than_s", "dry_run", "force")
    URL_FIELD_NUMBER: _ClassVar[int]
    OLDER_THAN_S_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    url: str
    older_than_s: float
    dry_run: bool
    force: bool
    def __init__(self, url: _Optional[str] = ..., older_than_s: _Optional[float] = ..., dry_run: bool = ..., force: bool = ...) -> None: ...

class SweepProgress(_message.Message):
    __slots__ = ("id", "objects", "done", "uploads_listed", "aborted_uploads")
    ID_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    UPLOADS_LISTED_FIELD_NUMBER: _ClassVar[int]
    ABORTED_UPLOADS_FIELD_NUMBER: _ClassVar[int]
    id: _common_pb2.CheckpointId
    objects: int
    done: bool
    uploads_listed: bool
    aborted_uploads: int
    def __init__(self, id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., objects: _Optional[int] = ..., done: bool = ..., uploads_listed: bool = ..., aborted_uploads: _Optional[int] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("url", "checkpoint", "deep")
    URL_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    DEEP_FIELD_NUMBER: _ClassVar[int]
    url: str
    checkpoint: str
    deep: bool
    def __init__(self, url: _Optional[str] = ..., checkpoint: _Optional[str] = ..., deep: bool = ...) -> None: ...

class VerifyProgress(_message.Message):
    __slots__ = ("id", "checked_bytes", "total_bytes", "checked_chunks", "problems", "done")
    ID_FIELD_NUMBER: _ClassVar[int]
    CHECKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    id: _common_pb2.CheckpointId
    checked_bytes: int
    total_bytes: int
    checked_chunks: int
    problems: _containers.RepeatedCompositeFieldContainer[_common_pb2.ErrorInfo]
    done: bool
    def __init__(self, id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., checked_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., checked_chunks: _Optional[int] = ..., problems: _Optional[_Iterable[_Union[_common_pb2.ErrorInfo, _Mapping]]] = ..., done: bool = ...) -> None: ...

class RepairRequest(_message.Message):
    __slots__ = ("url", "checkpoint", "dry_run", "peers")
    URL_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    url: str
    checkpoint: str
    dry_run: bool
    peers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, url: _Optional[str] = ..., checkpoint: _Optional[str] = ..., dry_run: bool = ..., peers: _Optional[_Iterable[str]] = ...) -> None: ...

class MendedObject(_message.Message):
    __slots__ = ("key", "code", "sources")
    class SourcesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    key: str
    code: str
    sources: _containers.ScalarMap[str, int]
    def __init__(self, key: _Optional[str] = ..., code: _Optional[str] = ..., sources: _Optional[_Mapping[str, int]] = ...) -> None: ...

class RepairResponse(_message.Message):
    __slots__ = ("id", "mended", "problems", "unreachable")
    class UnreachableEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _common_pb2.ErrorInfo
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_common_pb2.ErrorInfo, _Mapping]] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    MENDED_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    id: _common_pb2.CheckpointId
    mended: _containers.RepeatedCompositeFieldContainer[MendedObject]
    problems: _containers.RepeatedCompositeFieldContainer[_common_pb2.ErrorInfo]
    unreachable: _containers.MessageMap[str, _common_pb2.ErrorInfo]
    def __init__(self, id: _Optional[_Union[_common_pb2.CheckpointId, _Mapping]] = ..., mended: _Optional[_Iterable[_Union[MendedObject, _Mapping]]] = ..., problems: _Optional[_Iterable[_Union[_common_pb2.ErrorInfo, _Mapping]]] = ..., unreachable: _Optional[_Mapping[str, _common_pb2.ErrorInfo]] = ...) -> None: ...
