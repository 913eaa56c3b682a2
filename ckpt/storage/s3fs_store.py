"""fsspec+s3:// -- S3 through s3fs, for credential set-ups and servers that obstore does not take.

Everything goes through the S3 calls themselves: exact prefixes, pages, conditions and parts, and no
listing cache. Costs ten times obstore's CPU; never use it in a trainer's process.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from botocore.exceptions import ConnectTimeoutError, EndpointConnectionError

from ckpt.digest import Buffer
from ckpt.errors import CkptError, ConflictError, InvalidInputError, NotFoundError, UnavailableError
from ckpt.storage.base import ObjectInfo
from ckpt.storage.fsspec_store import FsspecStore, open_filesystem
from ckpt.storage.parts import part_nbytes_for, regrouped
from ckpt.storage.s3_config import ClientLimits, S3Config, split_bucket_url

__all__ = ["S3fsStore"]

_PAGE = 1000


class S3fsStore(FsspecStore):
    """See the module. The same options as the obstore engine; others are storage options of s3fs.

    Args:
        url: ``s3://bucket/prefix``.
        options: see :mod:`ckpt.storage.s3_config`, and ``timeout_s``, ``connect_timeout_s``, ``retries``.
    """

    def __init__(self, url: str, options: Mapping[str, str] | None = None) -> None:
        rest = dict(options or {})
        limits = ClientLimits.take_from(rest)
        self._bucket, self._prefix = split_bucket_url(url.rstrip("/"))
        s3 = S3Config.resolve(self._bucket, rest)
        filesystem = open_filesystem(
            "s3",
            {
                "key": s3.access_key_id,
                "secret": s3.secret_access_key,
                "token": s3.session_token,
                "endpoint_url": s3.endpoint_url,
                "client_kwargs": {"region_name": s3.region},
                "config_kwargs": {
                    "connect_timeout": limits.connect_timeout_s,
                    "read_timeout": limits.timeout_s,
                    "retries": {"total_max_attempts": 1 + limits.retries, "mode": "standard"},
                    "s3": {
                        "addressing_style": "virtual" if s3.virtual_hosted else "path",
                        "payload_signing_enabled": False,
                    },
                    # Newer checksum headers are refused by many S3-compatible servers.
                    "request_checksum_calculation": "when_required",
                    "response_checksum_validation": "when_required",
                },
                **s3.rest,
            },
        )
        self._checked = {"ChecksumAlgorithm": "SHA256"} if s3.upload_checksum else {}
        # botocore repeats requests, s3fs only what botocore cannot: a body that breaks off. The two multiply.
        filesystem.retries = 2
        super().__init__(url, filesystem=filesystem)

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _call(self, operation: str, key: str, **arguments: Any) -> Any:
        with self._errors(key):
            return self._fs.call_s3(operation, Bucket=self._bucket, **arguments)

    def _translate(self, error: Exception, key: str) -> CkptError:
        status, code = _answer(error)
        if code == "NoSuchBucket":
            return InvalidInputError("the bucket does not exist", code="no-bucket", url=self._url)
        if status in (409, 412):
            return ConflictError("the object exists", key=key, url=self._url)
        if status == 404:
            return NotFoundError("no such object", key=key, url=self._url)
        if isinstance(error, EndpointConnectionError | ConnectTimeoutError):
            return UnavailableError(
                "the object store cannot be reached", code="unreachable", url=self._url, reason=str(error)
            )
        if code == "BadDigest":
            return UnavailableError(
                "the service received other bytes than were sent: damaged on the way",
                code="bad-digest",
                key=key,
                url=self._url,
            )
        if status in (401, 403) or code == "ExpiredToken":
            error = PermissionError(str(error))
        elif isinstance(error, FileNotFoundError) and status is not None:
            # s3fs makes "not found" of some other refusals; only the service's own 404 is absence.
            error = OSError(str(error))
        return super()._translate(error, key)

    def put(self, key: str, data: Buffer) -> None:
        self._call("put_object", key, Key=self._full(key), Body=bytes(data), **self._checked)

    def _create(self, key: str, data: Buffer) -> None:
        # Always one request: several servers ignore the condition when a multipart upload completes.
        self._call("put_object", key, Key=self._full(key), Body=bytes(data), IfNoneMatch="*", **self._checked)

    def put_parts(
        self, key: str, pieces: Iterable[Buffer], *, most_nbytes: int, part_nbytes: int, concurrency: int
    ) -> None:
        """Upload in parts; holds ``concurrency`` copies of a part, since botocore takes no views."""
        bodies = regrouped(pieces, part_nbytes_for(most_nbytes, part_nbytes))
        first = next(bodies, b"")
        second = next(bodies, None)
        if second is None:
            self.put(key, first)
            return
        where = {"Key": self._full(key)}
        where["UploadId"] = self._call("create_multipart_upload", key, **where, **self._checked)["UploadId"]

        def send(number: int, body: bytes) -> dict[str, Any]:
            answer = self._call("upload_part", key, PartNumber=number, Body=body, **where, **self._checked)
            kept = ("ETag", "ChecksumSHA256")
            return {"PartNumber": number} | {name: answer[name] for name in kept if name in answer}

        try:
            parts: list[dict[str, Any]] = []
            flying: deque[Future[dict[str, Any]]] = deque()
            with ThreadPoolExecutor(concurrency, thread_name_prefix="ckpt-s3-part") as pool:
                for number, body in enumerate(itertools.chain((first, second), bodies), 1):
                    flying.append(pool.submit(send, number, body))
                    if len(flying) > concurrency:
                        parts.append(flying.popleft().result())
                parts += [future.result() for future in flying]
            self._call("complete_multipart_upload", key, MultipartUpload={"Parts": parts}, **where)
        except BaseException:
            # Unfinished uploads are invisible and billed. If this fails too, a lifecycle rule has to do it.
            with contextlib.suppress(CkptError):
                self._call("abort_multipart_upload", key, **where)
            raise

    def head(self, key: str) -> ObjectInfo:
        answer = self._call("head_object", key, Key=self._full(key))
        return ObjectInfo(
            key=key, nbytes=answer["ContentLength"], modified_at=answer["LastModified"].timestamp()
        )

    def list_keys(self, prefix: str, *, limit: int | None = None) -> Iterator[ObjectInfo]:
        """Yield as the contract says; one request for each page of up to 1000."""
        cut = len(self._full(""))
        arguments: dict[str, Any] = {"Prefix": self._full(prefix)}
        left, last = limit, ""
        while left is None or left > 0:
            size = _PAGE if left is None else min(left, _PAGE)
            answer = self._call("list_objects_v2", prefix, MaxKeys=size, **arguments)
            for entry in answer.get("Contents", ()):
                key = entry["Key"][cut:]
                if key <= last:
                    raise InvalidInputError(
                        "the service does not list in byte order, which 'newest first' stands on",
                        code="unordered-listing",
                        url=self._url,
                        key=key,
                    )
                last = key
                if left is not None:
                    left -= 1
                yield ObjectInfo(key=key, nbytes=entry["Size"], modified_at=entry["LastModified"].timestamp())
            if not answer.get("IsTruncated"):
                return
            arguments["ContinuationToken"] = answer["NextContinuationToken"]

    def list_dirs(self, prefix: str) -> Iterator[str]:
        """Yield as the contract says; one request for each page of up to 1000 folders and keys."""
        cut = len(self._full(prefix))
        arguments: dict[str, Any] = {"Prefix": self._full(prefix), "Delimiter": "/", "MaxKeys": _PAGE}
        while True:
            answer = self._call("list_objects_v2", prefix, **arguments)
            for entry in answer.get("CommonPrefixes", ()):
                yield entry["Prefix"][cut:-1]
            if not answer.get("IsTruncated"):
                return
            arguments["ContinuationToken"] = answer["NextContinuationToken"]

    def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        for start in range(0, len(wanted), _PAGE):
            objects = [{"Key": self._full(key)} for key in wanted[start : start + _PAGE]]
            answer = self._call("delete_objects", wanted[start], Delete={"Objects": objects, "Quiet": True})
            for failed in answer.get("Errors", ()):
                if failed.get("Code") != "NoSuchKey":
                    raise UnavailableError(
                        "the object store did not delete",
                        code="denied" if failed.get("Code") == "AccessDenied" else "unavailable",
                        key=failed.get("Key"),
                        reason=failed.get("Message"),
                    )

    def abort_uploads(self, *, before: float, dry_run: bool) -> int:
        """Abort multipart uploads below the URL that were begun before ``before``; see ``HasUploads``."""
        cut, count = len(self._full("")), 0
        arguments: dict[str, Any] = {"Prefix": self._full("")}
        while True:
            answer = self._call("list_multipart_uploads", "", **arguments)
            for upload in answer.get("Uploads", ()):
                if upload["Initiated"].timestamp() >= before:
                    continue
                count += 1
                key, number = upload["Key"], upload["UploadId"]
                with contextlib.suppress(NotFoundError):  # ended meanwhile
                    if not dry_run:
                        self._call("abort_multipart_upload", key[cut:], Key=key, UploadId=number)
            if not answer.get("IsTruncated"):
                return count
            arguments["KeyMarker"] = answer["NextKeyMarker"]
            arguments["UploadIdMarker"] = answer["NextUploadIdMarker"]

    def close(self) -> None:
        """Close the connections."""
        client = getattr(self._fs, "_s3", None)
        if client is not None:
            self._fs.close_session(self._fs.loop, client)


def _answer(error: BaseException | None) -> tuple[int | None, str | None]:
    """Return the service's (HTTP status, error code) that is behind ``error``, or (None, None)."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict) and "Error" in response:
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status, response["Error"].get("Code")
        error = error.__cause__
    return None, None
