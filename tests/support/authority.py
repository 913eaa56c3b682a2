"""A certificate authority for tests: real certificates for servers and clients on this machine."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

__all__ = ["Authority", "Pair"]

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """PEM files of a certificate and its key."""

    cert: Path
    key: Path

    def server_arguments(self) -> list[str]:
        return ["--tls-cert", str(self.cert), "--tls-key", str(self.key)]

    def client_environment(self) -> dict[str, str]:
        return {"CKPT_CLIENT_CERT": str(self.cert), "CKPT_CLIENT_KEY": str(self.key)}


class Authority:
    """Signs certificates; ``path`` is its own one, which those who trust it are given.

    Args:
        folder: where files go.
        name: of the authority.
    """

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(self._name, self._key.public_key(), days=(-1, 2))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(self._pem(builder.sign(self._key, hashes.SHA256())))

    def issue(self, file: str, *, host: str = "localhost", days: tuple[int, int] = (-1, 2)) -> Pair:
        """Issue a certificate for ``host``, valid between ``days`` from now, as ``file``.pem and .key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
        builder = self._builder(subject, key.public_key(), days=days)
        names = x509.SubjectAlternativeName([x509.DNSName(host)])
        signed = builder.add_extension(names, critical=False).sign(self._key, hashes.SHA256())
        pair = Pair(self._folder / f"{file}.pem", self._folder / f"{file}.key")
        pair.cert.write_bytes(self._pem(signed))
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return pair

    def _builder(
        self, subject: x509.Name, public: ec.EllipticCurvePublicKey, *, days: tuple[int, int]
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + days[0] * _DAY)
            .not_valid_after(now + days[1] * _DAY)
        )

    @staticmethod
    def _pem(certificate: x509.Certificate) -> bytes:
        return certificate.public_bytes(serialization.Encoding.PEM)
