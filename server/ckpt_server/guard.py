"""Clients that keep a call waiting: threads are few, so whoever makes one wait for bytes loses the call.

Only the time counts that gRPC waits for the client: for its next message, or for it to take what was sent. A
request is read under this watch as well, which is why every method is served as one with a request stream
(on the wire they are the same).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc

from ckpt.clock import Clock
from ckpt.errors import BusyError, InvalidInputError
from ckpt.events import event, get_logger
from ckpt_server.interceptors import Continuation, Handler

__all__ = ["StallGuard"]

T = TypeVar("T")

_log = get_logger("server.guard")
_LOOK_S = 1.0
# Streams that hold a chunk in memory while it arrives.
_UPLOADS = ("/ckpt.v1.Bulk/PutChunks", "/ckpt.v1.Bulk/Replicate")
MAX_UPLOADS = 16
# Silence is news there: what follows from it is decided by ckpt_server.liveness, which bounds their number.
_PATIENT = ("/ckpt.v1.Staging/Heartbeat",)


class _Call:
    """One call: since when it waits for its client."""

    def __init__(self, method: str, context: grpc.ServicerContext, clock: Clock) -> None:
        self.method = method
        self.context = context
        self.waiting_since: float | None = None
        self._clock = clock

    def waits(self) -> None:
        self.waiting_since = self._clock.monotonic()

    def goes_on(self) -> None:
        self.waiting_since = None

    def reading(self, messages: Iterator[T]) -> Iterator[T]:
        while True:
            self.waits()
            try:
                message = next(messages)
            except StopIteration:
                return
            finally:
                self.goes_on()
            yield message


class StallGuard(grpc.ServerInterceptor):
    """Cuts off calls that wait for their client. The first in a server's chain after the error mapping.

    Args:
        stall_s: longest wait.
        clock: time.
    """

    def __init__(self, stall_s: float, clock: Clock) -> None:
        self._stall_s = stall_s
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: set[_Call] = set()  # guarded by self._lock
        self._uploads = threading.BoundedSemaphore(MAX_UPLOADS)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ckpt-guard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch."""
        self._ended.set()

    def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        return self._guarded(handler, handler_call_details.method)

    def _guarded(self, handler: Handler, method: str) -> Handler:
        inner = _behaviour(handler)
        if handler.response_streaming:
            make: Callable[..., Handler] = grpc.stream_stream_rpc_method_handler
            serve: Callable[..., Any] = self._streaming(inner, method)
        else:
            make, serve = grpc.stream_unary_rpc_method_handler, self._unary(inner, method)
        return make(
            serve,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _unary(self, inner: Callable[..., Any], method: str) -> Callable[..., Any]:
        def call(messages: Iterator[Any], context: grpc.ServicerContext) -> Any:
            with _Registered(self, method, context) as known:
                return inner(known.reading(messages), context)

        return call

    def _streaming(self, inner: Callable[..., Any], method: str) -> Callable[..., Iterator[Any]]:
        def call(messages: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            with _Registered(self, method, context) as known:
                for reply in inner(known.reading(messages), context):
                    known.waits()
                    yield reply
                    known.goes_on()

        return call

    def enter(self, call: _Call) -> None:
        if call.method in _UPLOADS and not self._uploads.acquire(blocking=False):
            raise BusyError("too many segments arrive at once; try again", code="uploads", most=MAX_UPLOADS)
        if call.method not in _PATIENT:
            with self._lock:
                self._calls.add(call)

    def leave(self, call: _Call) -> None:
        with self._lock:
            self._calls.discard(call)
        if call.method in _UPLOADS:
            self._uploads.release()

    def new_call(self, method: str, context: grpc.ServicerContext) -> _Call:
        return _Call(method, context, self._clock)

    def _watch(self) -> None:
        while not self._ended.wait(min(_LOOK_S, self._stall_s / 2)):
            late = self._clock.monotonic() - self._stall_s
            with self._lock:
                stalled = [c for c in self._calls if c.waiting_since is not None and c.waiting_since < late]
            for call in stalled:
                event(_log, logging.WARNING, "rpc.stalled", method=call.method, peer=call.context.peer())
                call.context.cancel()


class _Registered:
    """A call, known to the guard for the block."""

    def __init__(self, guard: StallGuard, method: str, context: grpc.ServicerContext) -> None:
        self._guard = guard
        self._call = guard.new_call(method, context)

    def __enter__(self) -> _Call:
        self._guard.enter(self._call)
        return self._call

    def __exit__(self, *exc_info: object) -> None:
        self._guard.leave(self._call)


def _behaviour(handler: Handler) -> Callable[..., Any]:
    """What serves the call, with an iterator of requests whatever the method takes."""
    if handler.request_streaming:
        return handler.stream_stream if handler.response_streaming else handler.stream_unary  # type: ignore[return-value]
    inner = handler.unary_stream if handler.response_streaming else handler.unary_unary

    def call(messages: Iterator[Any], context: grpc.ServicerContext) -> Any:
        request = next(messages, None)
        if request is None:
            raise InvalidInputError("the request is empty", code="request")
        assert inner is not None
        return inner(request, context)

    return call
