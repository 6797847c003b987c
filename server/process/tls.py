"""Loads the server's TLS certificate, and reloads it while the server runs.

A connection keeps the TLS context that it was accepted with, so a new certificate applies to new connections
only.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from server.config import Config


class CertificateError(Exception):
    """Certificates cannot be used; the message names the file and says why, on one line."""


class Tls:
    """What connections are accepted with. context: the newest that could be made."""

    def __init__(self, config: Config) -> None:
        """Raises CertificateError."""
        self.context = _context(config)

    def reload(self, config: Config) -> None:
        """Read the files again. After a CertificateError all is as it was.

        A new context takes the old one's place: in an old one, authorities that were taken from the file
        would still be believed, and a certificate whose key does not fit would be half in force.
        """
        self.context = _context(config)


def _context(config: Config) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    assert config.ssl_certfile is not None
    key = config.ssl_keyfile or config.ssl_certfile
    for file in (config.ssl_certfile, key, config.ssl_ca_certs):
        _readable(file)
    try:
        # Without a password given, OpenSSL would ask for one on the terminal and wait.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
    except OSError as error:
        message = f"{config.ssl_certfile} and {key} hold no certificate with its key, not encrypted, as PEM"
        raise CertificateError(f"{message}: {_why(error)}") from None
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except OSError as error:
            raise CertificateError(
                f"{config.ssl_ca_certs} holds no certificates as PEM: {_why(error)}"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _readable(file: Path | None) -> None:
    if file is not None:
        try:
            file.open("rb").close()
        except OSError as error:
            raise CertificateError(f"{file} cannot be read: {error.strerror}") from None


def _why(error: OSError) -> str:
    return (getattr(error, "reason", None) or str(error)).lower().replace("_", " ")
