"""Authorisation of every call over TCP: which scope a method needs, and which run a request is about.

A method that is not in the table is refused to everybody: what is added must say what it needs.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import grpc

from ckpt.errors import CkptError, NotFoundError, RefusedError
from ckpt.events import event, get_logger
from ckpt.format import keys
from ckpt.rpc.messages import parse_request
from ckpt.storage.peerfile import replicas_dir
from ckpt.storage.staging import RunConfig, StagingDir
from ckpt_proto.v1 import peer_pb2, replica_pb2, restore_pb2, staging_pb2
from ckpt_server.interceptors import Continuation, Handler, rewrap
from ckpt_server.tokens import Grant, Scope, Tokens, everything

__all__ = ["METHODS", "OPEN_SERVICE", "AccessInterceptor", "Method"]

_log = get_logger("server.access")

# Load balancers and orchestrators ask for health without credentials.
OPEN_SERVICE = "/grpc.health.v1.Health/"

ANY_RUN = "any"  # no URL: the request touches nobody's run

RunUrl: TypeAlias = "Callable[[Any, StagingDir], str | None]"
"""From a request: the URL of its run; None: it is about all runs."""


@dataclass(frozen=True, slots=True)
class Method:
    """What a method asks of a token.

    Attributes:
        scopes: any of these is enough; empty: every known caller may.
        run: tells the run of a request.
        scope_of: where it depends on the request: the one scope that this request needs.
        message: makes the message that the first raw message of a Bulk method is parsed into.
    """

    scopes: frozenset[Scope]
    run: RunUrl
    scope_of: Callable[[Any, StagingDir], Scope] | None = None
    message: Callable[[], Any] | None = None


def _url(request: Any, _: StagingDir) -> str | None:
    return str(request.url)


def _no_run(request: Any, _: StagingDir) -> str | None:
    return ANY_RUN


def _below_root(request: Any, _: StagingDir) -> str | None:
    # A token that may see every run directly below the root may list them.
    return f"{request.root.rstrip('/')}/any-run" if request.root else None


def _config_url(request: Any, _: StagingDir) -> str | None:
    return str(request.config.url)


def _by_run_key(request: Any, staging: StagingDir) -> str | None:
    if not request.run_key:
        return None
    for place in (staging, replicas_dir(staging)):
        try:
            return place.read_run_config(request.run_key).url
        except NotFoundError:
            continue
    return ""  # a run that this node does not know: no pattern fits


def _if_known(request: Any, staging: StagingDir) -> str | None:
    """The same for calls that find nothing, and change nothing, where the run is not known."""
    return _by_run_key(request, staging) or ANY_RUN


def _pin_scope(request: Any, _: StagingDir) -> Scope:
    return Scope.WRITE if request.pinned else Scope.ADMIN  # what is not pinned may be deleted


def _delete_scope(request: Any, _: StagingDir) -> Scope:
    return Scope.READ if request.dry_run else Scope.ADMIN


def _repair_scope(request: Any, _: StagingDir) -> Scope:
    """Whoever names nodes to ask has the server's own token sent there."""
    return Scope.READ if request.dry_run and not request.peers else Scope.ADMIN


def _register_scope(request: Any, staging: StagingDir) -> Scope:
    """Store options say where the server's credentials go to: who sets others must be trusted with them."""
    wanted = RunConfig.from_proto(request.config)
    known: Mapping[str, str] = {}
    with contextlib.suppress(NotFoundError):
        known = staging.read_run_config(keys.run_key(wanted.url)).store_options
    return Scope.WRITE if dict(wanted.store_options) == dict(known) else Scope.ADMIN


def _method(*scopes: Scope, run: RunUrl = _url, **more: Any) -> Method:
    return Method(frozenset(scopes), run, **more)


_R, _W, _P = Scope.READ, Scope.WRITE, Scope.PEER
METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "/ckpt.v1.Staging/Register": _method(_W, run=_config_url, scope_of=_register_scope),
        "/ckpt.v1.Staging/Seal": _method(_W, run=_by_run_key),
        "/ckpt.v1.Staging/Status": _method(_R, run=_by_run_key),
        "/ckpt.v1.Staging/Watch": _method(_R, run=_by_run_key),
        "/ckpt.v1.Staging/Heartbeat": _method(_W, run=_if_known),
        "/ckpt.v1.Catalog/ListRuns": _method(_R, run=_below_root),
        "/ckpt.v1.Catalog/ListCheckpoints": _method(_R),
        "/ckpt.v1.Catalog/GetManifest": _method(_R),
        "/ckpt.v1.Catalog/Pin": _method(_W, scope_of=_pin_scope),
        "/ckpt.v1.Catalog/Prune": _method(_R, scope_of=_delete_scope),
        "/ckpt.v1.Catalog/Sweep": _method(_R, scope_of=_delete_scope),
        "/ckpt.v1.Catalog/Verify": _method(_R),
        "/ckpt.v1.Catalog/Repair": _method(_R, scope_of=_repair_scope),
        "/ckpt.v1.Restore/GetIndex": _method(_R),
        "/ckpt.v1.Peer/Have": _method(_R, _P, run=_if_known),
        "/ckpt.v1.Peer/GetSegment": _method(_R, _P, run=_by_run_key),
        "/ckpt.v1.Replica/Offer": _method(_P, run=_config_url),
        "/ckpt.v1.Replica/Greet": _method(_P, run=_if_known),
        "/ckpt.v1.Bulk/PutChunks": _method(_W, run=_by_run_key, message=staging_pb2.PutChunksHeader),
        "/ckpt.v1.Bulk/ReadTensor": _method(_R, message=restore_pb2.ReadTensorRequest),
        "/ckpt.v1.Bulk/ReadChunks": _method(_R, message=restore_pb2.ReadChunksRequest),
        "/ckpt.v1.Bulk/ReadSegment": _method(_R, _P, run=_by_run_key, message=peer_pb2.ReadSegmentRequest),
        "/ckpt.v1.Bulk/Replicate": _method(_P, run=_by_run_key, message=replica_pb2.ReplicateHeader),
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _method(run=_no_run),
    }
)


class AccessInterceptor(grpc.ServerInterceptor):
    """Lets callers do what their token allows, and everybody ask for health.

    Args:
        tokens: None: who has a client certificate may do everything.
        staging: tells the URL of a run key.
    """

    def __init__(self, tokens: Tokens | None, staging: StagingDir) -> None:
        self._tokens = tokens
        self._staging = staging

    def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        name = handler_call_details.method
        handler = continuation(handler_call_details)
        if handler is None or name.startswith(OPEN_SERVICE):
            return handler
        grant = self._grant_of(handler_call_details)
        if grant is None:
            return _refusing(handler, RefusedError("the token is missing or wrong", code="unauthenticated"))
        method = METHODS.get(name)
        if method is None:
            return _refusing(handler, _denied(grant, name, "no scope is defined for this method"))
        if method.scopes and not method.scopes & grant.scopes:
            return _refusing(handler, _denied(grant, name, needed=" or ".join(sorted(method.scopes))))
        return rewrap(handler, lambda behaviour: self._checked(name, method, grant, behaviour))

    def _grant_of(self, details: grpc.HandlerCallDetails) -> Grant | None:
        if self._tokens is None:
            return everything("certificate")
        sent = str(dict(details.invocation_metadata or ()).get("authorization", ""))
        kind, _, token = sent.partition(" ")
        return self._tokens.grant_of(token) if kind == "Bearer" else None

    def _checked(
        self, name: str, method: Method, grant: Grant, behaviour: Callable[..., Any]
    ) -> Callable[..., Any]:
        def call(request: Any, context: grpc.ServicerContext) -> Any:
            if isinstance(request, Iterator):
                return behaviour(self._opened(name, method, grant, request), context)
            self._check(name, method, grant, request)
            return behaviour(request, context)

        return call

    def _opened(self, name: str, method: Method, grant: Grant, messages: Iterator[Any]) -> Iterator[Any]:
        """The messages, the first of which names the run."""
        first = next(messages, None)
        if first is None:
            return iter(())
        self._check(name, method, grant, first)
        return itertools.chain((first,), messages)

    def _check(self, name: str, method: Method, grant: Grant, request: Any) -> None:
        if method.message is not None:
            request = parse_request(method.message(), request)
        if method.scope_of is not None:
            needed = method.scope_of(request, self._staging)
            if needed not in grant.scopes:
                raise _denied(grant, name, needed=needed)
        url = method.run(request, self._staging)
        if url != ANY_RUN and not grant.is_good_for(url):
            raise _denied(grant, name, needed=" or ".join(sorted(method.scopes)), run=_named(url))


def _named(url: str | None) -> str:
    if url is None:
        return "all runs"
    return url or "one that is not known here"


def _denied(grant: Grant, method: str, message: str = "", **context: object) -> CkptError:
    event(_log, logging.WARNING, "access.denied", token=grant.name, method=method, **context)
    text = message or "the token does not allow this: it lacks the scope, or does not reach the run"
    return RefusedError(text, code="permission-denied", method=method, token=grant.name, **context)


def _refusing(handler: Handler, error: CkptError) -> Handler:
    """A handler that refuses and reads no byte of the request, however large it was going to be."""

    def refuse(messages: Iterator[Any], context: grpc.ServicerContext) -> Any:
        raise error

    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(_generator(refuse))
    return grpc.stream_unary_rpc_method_handler(refuse)


def _generator(refuse: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    def call(messages: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        refuse(messages, context)
        yield from ()

    return call
