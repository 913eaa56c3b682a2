"""What happens around every call: error mapping, and counting who is connected."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import grpc

from ckpt.clock import Clock
from ckpt.errors import CkptError
from ckpt.events import event, get_logger
from ckpt.format.problem import error_to_info
from ckpt.rpc.status import ERROR_METADATA_KEY, status_code

__all__ = ["Activity", "Continuation", "ErrorInterceptor", "Handler", "rewrap"]

_log = get_logger("server.rpc")

# Signs of life between nodes: two idle servers must not keep each other alive by them.
_NO_ACTIVITY = "/ckpt.v1.Replica/Greet"

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Handler | None]"


class Activity:
    """How many calls are open, and when the last one ended. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open = 0  # guarded by self._lock
        self._last = clock.monotonic()  # guarded by self._lock

    def enter(self) -> None:
        with self._lock:
            self._open += 1

    def leave(self) -> None:
        with self._lock:
            self._open -= 1
            self._last = self._clock.monotonic()

    def idle_s(self) -> float:
        """Seconds since the last call ended; 0 while one is open."""
        with self._lock:
            return 0.0 if self._open else self._clock.monotonic() - self._last


class ErrorInterceptor(grpc.ServerInterceptor):
    """Turns CkptErrors into statuses (see ckpt.rpc.status) and keeps the activity count."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity

    def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        wrap = self._wrap_stream if handler.response_streaming else self._wrap_unary
        return rewrap(handler, lambda behaviour: wrap(method, behaviour))

    @contextlib.contextmanager
    def _counted(self, method: str) -> Iterator[None]:
        if method == _NO_ACTIVITY:
            yield
            return
        self._activity.enter()
        try:
            yield
        finally:
            self._activity.leave()

    def _wrap_unary(self, method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        def call(request: Any, context: grpc.ServicerContext) -> Any:
            with self._counted(method):
                try:
                    return behaviour(request, context)
                except Exception as error:  # noqa: BLE001 - RPC border: mapped, logged, sent to the caller
                    _abort(context, method, error)

        return call

    def _wrap_stream(self, method: str, behaviour: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
        def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with self._counted(method):
                try:
                    yield from behaviour(request, context)
                except Exception as error:  # noqa: BLE001 - RPC border: mapped, logged, sent to the caller
                    _abort(context, method, error)

        return call


def _abort(context: grpc.ServicerContext, method: str, error: Exception) -> None:
    if not context.is_active() or type(error) is Exception:
        raise error  # the caller left, or this is gRPC's own abort passing through
    if not isinstance(error, CkptError):
        _log.exception("rpc.crashed %s", method)
        error = CkptError("the server failed in a way it should not", reason=repr(error))
    else:
        event(_log, logging.INFO, "rpc.error", method=method, code=error.code, error=error)
    context.set_trailing_metadata(((ERROR_METADATA_KEY, error_to_info(error).SerializeToString()),))
    context.abort(status_code(error), str(error)[:1024])


def rewrap(handler: Handler, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Handler:
    """Return ``handler`` with its behaviour replaced by ``wrap`` of it."""
    kinds: dict[tuple[bool, bool], tuple[str, Callable[..., Handler]]] = {
        (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
        (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
        (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
        (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
    }
    attribute, make = kinds[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(
        wrap(getattr(handler, attribute)),
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
