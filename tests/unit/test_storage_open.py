from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.errors import InvalidInputError
from ckpt.storage.open import open_store
from ckpt.storage.s3_config import S3Config

NO_FILES = {"AWS_CONFIG_FILE": "/nonexistent/config", "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent/keys"}
KEYS = {"access_key_id": "a", "secret_access_key": "b"}


@pytest.mark.parametrize(
    ("url", "engine"),
    [
        ("file:///tmp/x/run", "LocalStore"),
        ("/tmp/x/run", "LocalStore"),
        ("memory://x/run", "MemoryStore"),
        ("s3://bucket/run", "ObstoreStore"),
        ("gs://bucket/run", "ObstoreStore"),
        ("fsspec+s3://bucket/run", "S3fsStore"),
        ("fsspec+memory://x/run", "FsspecStore"),
        ("local:///tmp/x/run", "FsspecStore"),
    ],
)
def test_the_url_chooses_the_engine_and_is_kept(url: str, engine: str) -> None:
    options = KEYS if "s3" in url else {}
    store = open_store(url + "/", options)
    assert type(store).__name__ == engine
    assert store.url == (url if "://" in url else f"file://{url}")
    store.close()


def test_the_engine_can_be_an_option() -> None:
    assert type(open_store("s3://bucket/run", KEYS | {"engine": "fsspec"})).__name__ == "S3fsStore"


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("file://relative/run", {}),
        ("nosuchscheme://x/run", {}),
        ("s3:///run", KEYS),
        ("s3://bucket/run", KEYS | {"nosuch": "1"}),
        ("s3://bucket/run", {"access_key_id": "a"}),
        ("s3://bucket/run", KEYS | {"endpoint_url": "localhost:9000"}),
        ("s3://bucket/run", KEYS | {"addressing_style": "odd"}),
        ("s3://bucket/run", KEYS | {"retries": "many"}),
        ("fsspec+s3://bucket/run", KEYS | {"retries": "many"}),
        ("s3://bucket/run", {"engine": "boto"}),
    ],
)
def test_a_bad_url_or_option_is_refused_at_once(url: str, options: dict[str, str]) -> None:
    with pytest.raises(InvalidInputError):
        open_store(url, options)


def test_options_go_before_the_environment_and_the_service_variable_before_the_general() -> None:
    environ = NO_FILES | {
        "AWS_ENDPOINT_URL": "http://general",
        "AWS_ENDPOINT_URL_S3": "http://s3/",
        "AWS_DEFAULT_REGION": "eu-west-1",
        "AWS_ACCESS_KEY_ID": "env",
        "AWS_SECRET_ACCESS_KEY": "env-secret",
        "AWS_SESSION_TOKEN": "env-token",
    }
    found = S3Config.resolve("b", {}, environ)
    assert (found.endpoint_url, found.region) == ("http://s3", "eu-west-1")
    assert (found.access_key_id, found.session_token) == ("env", "env-token")
    found = S3Config.resolve("b", KEYS | {"endpoint_url": "https://mine", "region": "r"}, environ)
    assert (found.endpoint_url, found.region) == ("https://mine", "r")
    # Keys of one source never travel with the token of another.
    assert (found.access_key_id, found.session_token) == ("a", None)


def test_the_bucket_is_in_the_host_name_only_at_amazon_and_only_where_certificates_allow() -> None:
    assert S3Config.resolve("b", KEYS, NO_FILES).virtual_hosted
    assert not S3Config.resolve("b.c", KEYS, NO_FILES).virtual_hosted
    assert not S3Config.resolve("b", KEYS | {"endpoint_url": "http://x"}, NO_FILES).virtual_hosted
    assert S3Config.resolve(
        "b", KEYS | {"endpoint_url": "http://x", "addressing_style": "virtual"}, NO_FILES
    ).virtual_hosted


def test_secrets_are_not_in_the_text_of_the_settings() -> None:
    assert "b-secret" not in repr(
        S3Config.resolve("x", {"access_key_id": "a", "secret_access_key": "b-secret"}, NO_FILES)
    )


def test_the_profile_is_used_where_nothing_else_has_keys(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("[profile p]\nregion = eu-north-1\nendpoint_url = http://p\n")
    (tmp_path / "keys").write_text("[p]\naws_access_key_id = x\naws_secret_access_key = y\n")
    environ = {
        "AWS_PROFILE": "p",
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "keys"),
    }
    found = S3Config.resolve("b", {}, environ)
    assert (found.from_profile, found.region, found.endpoint_url) == (True, "eu-north-1", "http://p")
    assert not S3Config.resolve("b", KEYS, environ).from_profile
    assert not S3Config.resolve("b", {}, environ | {"AWS_WEB_IDENTITY_TOKEN_FILE": "/t"}).from_profile
