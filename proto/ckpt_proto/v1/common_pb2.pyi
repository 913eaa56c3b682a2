from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CheckpointId(_message.Message):
    __slots__ = ("step", "attempt")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    step: int
    attempt: int
    def __init__(self, step: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class NodeGroup(_message.Message):
    __slots__ = ("index", "count", "ranks")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    index: int
    count: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., count: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class PeerNode(_message.Message):
    __slots__ = ("node_id", "target", "domain", "host", "ranks")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    target: str
    domain: str
    host: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, node_id: _Optional[str] = ..., target: _Optional[str] = ..., domain: _Optional[str] = ..., host: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class Mesh(_message.Message):
    __slots__ = ("shape", "names", "base", "strides", "ranks")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    base: int
    strides: _containers.RepeatedScalarFieldContainer[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., names: _Optional[_Iterable[str]] = ..., base: _Optional[int] = ..., strides: _Optional[_Iterable[int]] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("kind", "dim", "split_factor")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Placement.Kind]
        KIND_REPLICATE: _ClassVar[Placement.Kind]
        KIND_SHARD: _ClassVar[Placement.Kind]
        KIND_STRIDED_SHARD: _ClassVar[Placement.Kind]
    KIND_UNSPECIFIED: Placement.Kind
    KIND_REPLICATE: Placement.Kind
    KIND_SHARD: Placement.Kind
    KIND_STRIDED_SHARD: Placement.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FACTOR_FIELD_NUMBER: _ClassVar[int]
    kind: Placement.Kind
    dim: int
    split_factor: int
    def __init__(self, kind: _Optional[_Union[Placement.Kind, str]] = ..., dim: _Optional[int] = ..., split_factor: _Optional[int] = ...) -> None: ...

class TensorLayout(_message.Message):
    __slots__ = ("name", "dtype", "global_shape", "mesh", "placements")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_SHAPE_FIELD_NUMBER: _ClassVar[int]
    MESH_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    global_shape: _containers.RepeatedScalarFieldContainer[int]
    mesh: int
    placements: _containers.RepeatedCompositeFieldContainer[Placement]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., global_shape: _Optional[_Iterable[int]] = ..., mesh: _Optional[int] = ..., placements: _Optional[_Iterable[_Union[Placement, _Mapping]]] = ...) -> None: ...

class LayoutSet(_message.Message):
    __slots__ = ("meshes", "tensors")
    MESHES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    meshes: _containers.RepeatedCompositeFieldContainer[Mesh]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorLayout]
    def __init__(self, meshes: _Optional[_Iterable[_Union[Mesh, _Mapping]]] = ..., tensors: _Optional[_Iterable[_Union[TensorLayout, _Mapping]]] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ("nothing", "boolean", "integer", "big_integer", "real_bits", "text", "data", "list", "tuple", "mapping", "tensor", "array", "registered")
    class Nothing(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class Sequence(_message.Message):
        __slots__ = ("items", "integers")
        ITEMS_FIELD_NUMBER: _ClassVar[int]
        INTEGERS_FIELD_NUMBER: _ClassVar[int]
        items: _containers.RepeatedCompositeFieldContainer[Value]
        integers: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, items: _Optional[_Iterable[_Union[Value, _Mapping]]] = ..., integers: _Optional[_Iterable[int]] = ...) -> None: ...
    class Mapping(_message.Message):
        __slots__ = ("keys", "values", "type")
        class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
            __slots__ = ()
            TYPE_DICT: _ClassVar[Value.Mapping.Type]
            TYPE_COUNTER: _ClassVar[Value.Mapping.Type]
        TYPE_DICT: Value.Mapping.Type
        TYPE_COUNTER: Value.Mapping.Type
        KEYS_FIELD_NUMBER: _ClassVar[int]
        VALUES_FIELD_NUMBER: _ClassVar[int]
        TYPE_FIELD_NUMBER: _ClassVar[int]
        keys: _containers.RepeatedCompositeFieldContainer[Value]
        values: _containers.RepeatedCompositeFieldContainer[Value]
        type: Value.Mapping.Type
        def __init__(self, keys: _Optional[_Iterable[_Union[Value, _Mapping]]] = ..., values: _Optional[_Iterable[_Union[Value, _Mapping]]] = ..., type: _Optional[_Union[Value.Mapping.Type, str]] = ...) -> None: ...
    class Array(_message.Message):
        __slots__ = ("dtype", "shape", "data", "is_scalar")
        DTYPE_FIELD_NUMBER: _ClassVar[int]
        SHAPE_FIELD_NUMBER: _ClassVar[int]
        DATA_FIELD_NUMBER: _ClassVar[int]
        IS_SCALAR_FIELD_NUMBER: _ClassVar[int]
        dtype: str
        shape: _containers.RepeatedScalarFieldContainer[int]
        data: bytes
        is_scalar: bool
        def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., is_scalar: bool = ...) -> None: ...
    class Registered(_message.Message):
        __slots__ = ("name", "value")
        NAME_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        name: str
        value: Value
        def __init__(self, name: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...
    NOTHING_FIELD_NUMBER: _ClassVar[int]
    BOOLEAN_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    BIG_INTEGER_FIELD_NUMBER: _ClassVar[int]
    REAL_BITS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    TUPLE_FIELD_NUMBER: _ClassVar[int]
    MAPPING_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    nothing: Value.Nothing
    boolean: bool
    integer: int
    big_integer: bytes
    real_bits: int
    text: str
    data: bytes
    list: Value.Sequence
    tuple: Value.Sequence
    mapping: Value.Mapping
    tensor: str
    array: Value.Array
    registered: Value.Registered
    def __init__(self, nothing: _Optional[_Union[Value.Nothing, _Mapping]] = ..., boolean: bool = ..., integer: _Optional[int] = ..., big_integer: _Optional[bytes] = ..., real_bits: _Optional[int] = ..., text: _Optional[str] = ..., data: _Optional[bytes] = ..., list: _Optional[_Union[Value.Sequence, _Mapping]] = ..., tuple: _Optional[_Union[Value.Sequence, _Mapping]] = ..., mapping: _Optional[_Union[Value.Mapping, _Mapping]] = ..., tensor: _Optional[str] = ..., array: _Optional[_Union[Value.Array, _Mapping]] = ..., registered: _Optional[_Union[Value.Registered, _Mapping]] = ...) -> None: ...

class ErrorInfo(_message.Message):
    __slots__ = ("kind", "code", "message", "context")
    class ContextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    code: str
    message: str
    context: _containers.ScalarMap[str, str]
    def __init__(self, kind: _Optional[str] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., context: _Optional[_Mapping[str, str]] = ...) -> None: ...
