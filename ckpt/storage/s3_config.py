"""What both S3 engines need to know, from options, environment and the AWS credentials files.

Precedence, first wins: options; the variables botocore reads (``AWS_ENDPOINT_URL_S3``,
``AWS_ENDPOINT_URL``, ``AWS_REGION``, ``AWS_DEFAULT_REGION``, ``AWS_ACCESS_KEY_ID`` ...);
the profile ``AWS_PROFILE`` (else ``default``) of ``~/.aws/config`` and ``~/.aws/credentials``
(:mod:`ckpt.storage.s3_keys`).
Where none of them has keys, the engine asks the cloud's own sources (web identity, container, instance).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import InvalidInputError
from ckpt.storage.s3_keys import has_keys, read_profile

__all__ = ["ClientLimits", "S3Config", "split_bucket_url"]

_OURS = frozenset(
    {
        "endpoint_url",
        "region",
        "access_key_id",
        "secret_access_key",
        "session_token",
        "addressing_style",
        "upload_checksum",
    }
)
_CLOUD_SOURCES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """How long a client tries.

    Attributes:
        timeout_s: one whole request; must outlast one part on the slowest acceptable link.
        connect_timeout_s: until the connection stands.
        retries: repeats of a failed request, with doubling waits. What outlasts them is the caller's to
            wait for.
    """

    timeout_s: float = 120.0  # 16 MiB at 140 kB/s
    connect_timeout_s: float = 10.0
    retries: int = 6  # about 6 s

    @classmethod
    def take_from(cls, options: dict[str, str]) -> ClientLimits:
        """Remove these settings from ``options`` and return them. Raises InvalidInputError."""
        try:
            given: dict[str, Any] = {
                name: kind(options.pop(name))
                for name, kind in (("timeout_s", float), ("connect_timeout_s", float), ("retries", int))
                if name in options
            }
        except ValueError as error:
            raise InvalidInputError("timeouts and retries are numbers", reason=str(error)) from error
        return cls(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Config:
    """Resolved settings.

    Attributes:
        endpoint_url: None: Amazon's own.
        region: ``us-east-1`` where nothing says otherwise.
        access_key_id, secret_access_key, session_token: from options or environment; None: not given there.
        from_profile: keys are to be had from the profile (:func:`ckpt.storage.s3_keys.read_profile_keys`),
            again and again, since they may be renewed there during a long job.
        virtual_hosted: bucket in the host name instead of the path.
        upload_checksum: send the SHA-256 of every body that is put, for the service to check.
        rest: options that are not ours, for the engine.
    """

    endpoint_url: str | None
    region: str
    access_key_id: str | None
    secret_access_key: str | None = field(repr=False)
    session_token: str | None = field(repr=False)
    from_profile: bool
    virtual_hosted: bool
    upload_checksum: bool
    rest: dict[str, str]

    @classmethod
    def resolve(
        cls, bucket: str, options: Mapping[str, str], environ: Mapping[str, str] = os.environ
    ) -> S3Config:
        """Resolve ``options`` over ``environ`` over the files. Raises InvalidInputError."""
        profile = read_profile(environ)
        endpoint = (
            options.get("endpoint_url")
            or environ.get("AWS_ENDPOINT_URL_S3")
            or environ.get("AWS_ENDPOINT_URL")
            or profile.get("endpoint_url")
        )
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise InvalidInputError("an endpoint URL begins with http:// or https://", endpoint_url=endpoint)
        # Keys belong together: never mix those of one source with those of another.
        source = (
            {name: options.get(name) for name in ("access_key_id", "secret_access_key", "session_token")}
            if "access_key_id" in options
            else {
                name: environ.get(f"AWS_{name.upper()}") or None
                for name in ("access_key_id", "secret_access_key", "session_token")
            }
        )
        if bool(source["access_key_id"]) != bool(source["secret_access_key"]):
            raise InvalidInputError("an access key needs both its id and its secret", code="half-credentials")
        checksum = options.get("upload_checksum", "none")
        if checksum not in ("none", "sha256"):
            raise InvalidInputError("upload_checksum is none or sha256", upload_checksum=checksum)
        return cls(
            endpoint_url=endpoint.rstrip("/") if endpoint else None,
            region=options.get("region")
            or environ.get("AWS_REGION")
            or environ.get("AWS_DEFAULT_REGION")
            or profile.get("region")
            or "us-east-1",
            **source,
            from_profile=not source["access_key_id"]
            and not any(name in environ for name in _CLOUD_SOURCES)
            and has_keys(profile),
            virtual_hosted=_virtual(options.get("addressing_style", "auto"), endpoint, bucket),
            upload_checksum=checksum == "sha256",
            rest={name: value for name, value in options.items() if name not in _OURS},
        )


def _virtual(style: str, endpoint: str | None, bucket: str) -> bool:
    if style not in ("auto", "path", "virtual"):
        raise InvalidInputError("addressing_style is auto, path or virtual", addressing_style=style)
    # Amazon's wildcard certificate does not cover a bucket name with dots.
    return style == "virtual" or (style == "auto" and endpoint is None and "." not in bucket)


def split_bucket_url(url: str) -> tuple[str, str]:
    """Split ``scheme://bucket/some/prefix`` into bucket and prefix. Raises InvalidInputError."""
    bucket, _, prefix = url.partition("://")[2].partition("/")
    if not bucket:
        raise InvalidInputError("the URL names no bucket", url=url)
    return bucket, prefix.strip("/")
