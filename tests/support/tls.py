"""A certificate of its own for a server on this machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["make_certificate"]


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a self-signed certificate for ``localhost`` in ``folder``; returns it and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    return cert, key
