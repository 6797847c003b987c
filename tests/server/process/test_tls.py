"""TLS: what a client sees of certificates, and that new ones come without harm to what is open."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from cryptography import x509

from server.config import Config
from server.process.tls import CertificateError, Tls
from tests.support.certificates import make_certificate, trusting
from tests.support.forking import READY
from tests.support.processes import server_process
from tests.support.running import live_app

ROOT = Path(__file__).parents[3]


def local(url: str) -> str:
    """The name that the certificates are for."""
    return url.replace("127.0.0.1", "localhost")


async def serial_at(url: str) -> int:
    """The serial number of the certificate that a new connection is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    place = urlsplit(url)
    _, writer = await asyncio.open_connection(place.hostname, place.port, ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return x509.load_der_x509_certificate(shown).serial_number


async def command(folder: Path, *argv: str) -> tuple[int, str]:
    """The exit code of a command, and what it printed."""
    child = await asyncio.create_subprocess_exec(
        *(READY, "-m", "server.cli", *argv),
        cwd=ROOT,
        env={**os.environ, "ANTIPHON_DATA": str(folder)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(60):
        out, _ = await child.communicate()
    return child.returncode or 0, out.decode()


async def test_new_certificates_come_by_sighup_and_open_streams_live(tmp_path: Path) -> None:
    first, first_key, first_serial = make_certificate(tmp_path, "first")
    second, second_key, second_serial = make_certificate(tmp_path, "second")
    live, live_key = tmp_path / "live.pem", tmp_path / "live-key.pem"
    first.replace(live)
    first_key.replace(live_key)
    settings = f'tick_s = 0.05\nssl_certfile = "{live}"\nssl_keyfile = "{live_key}"\n'
    (tmp_path / "antiphon.toml").write_text(settings)
    async with server_process(tmp_path) as server:
        url = server.url
        assert url.startswith("https://")
        assert await serial_at(url) == first_serial
        async with httpx.AsyncClient(base_url=local(url), verify=trusting(live), timeout=20) as client:
            origin = {"origin": local(url)}  # a page of the server itself
            body = {"input": "count 40", "stream": True}
            async with client.stream("POST", "/v1/responses", json=body, headers=origin) as stream:
                chunks = stream.aiter_bytes()
                seen = await anext(chunks)
                second.replace(live)
                server.signal(signal.SIGHUP)  # the key does not fit
                await server.logs("the certificates stay as they were")
                assert await serial_at(url) == first_serial
                second_key.replace(live_key)
                server.signal(signal.SIGHUP)
                await server.logs("the certificates were read again")
                assert await serial_at(url) == second_serial
                assert not any("nothing has changed" in line for line in server.log), "it was no success"
                async for chunk in chunks:
                    seen += chunk
            assert b"event: response.completed" in seen
            assert (await client.get("/v1/models")).status_code == 200  # on the old connection
        third, third_key, third_serial = make_certificate(tmp_path, "third")
        (tmp_path / "antiphon.toml").write_text(
            f'tick_s = 0.05\nssl_certfile = "{third}"\nssl_keyfile = "{third_key}"\n'
        )
        before = len(server.log)
        server.signal(signal.SIGHUP)
        assert "restart" not in await server.logs("the certificates were read again", after=before)
        assert await serial_at(url) == third_serial
        # An operator's commands find the server by its address, for which no certificate is made out.
        code, out = await command(tmp_path, "keys", "create", "--name", "ann")
        assert code == 0, out
        code, out = await command(tmp_path, "keys", "list")
        assert code == 0 and "ann" in out


async def test_doctor_looks_at_the_certificate_and_its_key(tmp_path: Path) -> None:
    certfile, keyfile, _ = make_certificate(tmp_path, "server")
    flags = ("doctor", "--engine", "scripted", "--port", "0", "--ssl-certfile", str(certfile))
    keyfile.chmod(0o600)
    code, out = await command(tmp_path, *flags, "--ssl-keyfile", str(keyfile))
    assert code == 0, out
    keyfile.chmod(0o644)
    code, out = await command(tmp_path, *flags, "--ssl-keyfile", str(keyfile))
    assert code == 1 and f"other users can open {keyfile}" in out
    certfile.chmod(0o600)
    code, out = await command(tmp_path, *flags)
    assert code == 1 and "hold no certificate with its key" in out


async def test_a_client_has_to_show_a_certificate_where_authorities_are_given(tmp_path: Path) -> None:
    certfile, keyfile, _ = make_certificate(tmp_path, "server")
    of_client, key_of_client, _ = make_certificate(tmp_path, "client")
    stranger, key_of_stranger, _ = make_certificate(tmp_path, "stranger")
    settings = {"ssl_certfile": certfile, "ssl_keyfile": keyfile, "ssl_ca_certs": of_client}
    async with live_app(tmp_path, **settings) as server:

        async def status(*shown: Path) -> int:
            context = trusting(certfile)
            if shown:
                context.load_cert_chain(*shown)
            async with httpx.AsyncClient(base_url=local(server.base_url), verify=context) as client:
                return (await client.get("/v1/models")).status_code

        assert await status(of_client, key_of_client) == 200
        with pytest.raises(httpx.TransportError):
            await status()
        with pytest.raises(httpx.TransportError):
            await status(stranger, key_of_stranger)


async def test_who_speaks_no_tls_is_let_go_and_harms_nobody(tmp_path: Path) -> None:
    certfile, keyfile, _ = make_certificate(tmp_path, "server")
    settings = {"ssl_certfile": certfile, "ssl_keyfile": keyfile, "head_timeout_s": 0.3}
    async with live_app(tmp_path, **settings) as server:
        place = urlsplit(server.base_url)
        for said in (b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", b""):
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
            writer.write(said)
            async with asyncio.timeout(10):
                assert b"HTTP/1.1 200" not in await reader.read()  # its end, at the latest after the deadline
            writer.close()
            await writer.wait_closed()
        async with httpx.AsyncClient(base_url=local(server.base_url), verify=trusting(certfile)) as client:
            assert (await client.get("/health")).status_code == 200


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    certfile, keyfile, _ = make_certificate(tmp_path, "good")
    _, other_key, _ = make_certificate(tmp_path, "other")
    _, hidden_key, _ = make_certificate(tmp_path, "hidden", password=b"hush")
    nothing, missing = tmp_path / "nothing.pem", tmp_path / "missing.pem"
    nothing.write_text("no PEM")
    Tls(Config(ssl_certfile=certfile, ssl_keyfile=keyfile))
    for settings, named in (
        ({"ssl_certfile": missing}, missing),
        ({"ssl_certfile": nothing}, nothing),
        ({"ssl_certfile": certfile}, certfile),  # without its key
        ({"ssl_certfile": certfile, "ssl_keyfile": missing}, missing),
        ({"ssl_certfile": certfile, "ssl_keyfile": other_key}, other_key),
        ({"ssl_certfile": certfile, "ssl_keyfile": hidden_key}, hidden_key),
        ({"ssl_certfile": certfile, "ssl_keyfile": keyfile, "ssl_ca_certs": nothing}, nothing),
    ):
        with pytest.raises(CertificateError) as caught:
            Tls(Config(**settings))
        assert str(named) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--ssl-certfile", "/nowhere/cert.pem"), "/nowhere/cert.pem cannot be read"),
        (("--host", "0.0.0.0", "--require-tls"), "require_tls: no request could be taken"),
    ],
)
async def test_a_server_that_could_serve_nobody_does_not_start(
    tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    code, out = await command(tmp_path, "serve", "--engine", "scripted", "--port", "0", *flags)
    assert code == 2 and words in out and "Traceback" not in out
