"""Checks that a server of the right kind answers at an address.

Clients would wait minutes for a missing server.
"""

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from rl_loop.config.errors import StartError

CONNECT_SECONDS = 3.0

RAY_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""File that ``ray start`` writes and RAY_ADDRESS=auto reads."""

# HTTP/2 (RFC 9113): the preface of a client (section 3.4), and frames with a header of 9 bytes
# (section 4.1).
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# A frame's header has 3 bytes for the length, then type, flags and 4 bytes for the stream.
EMPTY_SETTINGS_FRAME = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
FRAME_HEADER_BYTES = 9
FRAME_TYPE_OFFSET = 3
SETTINGS = 4


def check_ray_address() -> None:
    """Check that the Ray cluster at RAY_ADDRESS answers.

    Raises:
        StartError: if it does not, or if another server answers.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    # For both values Ray starts an instance instead of connecting to one.
    if address in ("", "local"):
        return
    if address == "auto":
        if not RAY_CURRENT_CLUSTER.exists():
            raise StartError(
                "RAY_ADDRESS is auto, but no Ray was started on this machine. Unset RAY_ADDRESS "
                "to start a Ray for this run"
            )
        return

    host, port = _host_and_port(address)
    if host is None or port is None:
        raise StartError(f"RAY_ADDRESS is {address!r}, which is not HOST:PORT. Correct or unset it")

    advice = (
        "Start Ray there (ray start --head), correct RAY_ADDRESS, or unset it to start a Ray "
        "for this run"
    )
    try:
        is_ray = _speaks_http2(host, port)
    except OSError as error:
        raise StartError(
            f"RAY_ADDRESS is {address}, but no server answers there ({_reason(error)}). {advice}"
        ) from None
    if not is_ray:
        raise StartError(f"RAY_ADDRESS is {address}, but the server there is not Ray. {advice}")


def check_endpoint(url: str, named_by: str = "evaluation.endpoint") -> None:
    """Check that a server listens at a URL.

    Args:
        url: HTTP or HTTPS address.
        named_by: configuration key or variable that holds ``url``, for the message.

    Raises:
        StartError: if no server listens.
    """
    where = urlsplit(url)
    if where.scheme not in ("http", "https") or where.hostname is None:
        raise StartError(f"{named_by}: {url} is not an address such as http://host:8000/v1")

    port = where.port or (443 if where.scheme == "https" else 80)
    try:
        socket.create_connection((where.hostname, port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise StartError(
            f"{named_by}: no server answers at {url} ({_reason(error)}). Start the server, or "
            "correct the address"
        ) from None


def _host_and_port(address: str) -> tuple[str | None, int | None]:
    """Return host and port of an address with or without a scheme. None for a missing part."""
    # Without a scheme, urlsplit takes the host of HOST:PORT for the scheme.
    where = urlsplit(address if "://" in address else f"ray://{address}")
    try:
        # ``port`` raises ValueError if it is not a number, or out of range.
        return where.hostname, where.port
    except ValueError:
        return None, None


def _speaks_http2(host: str, port: int) -> bool:
    """Return True if a server answers HTTP/2's preface with a SETTINGS frame, as gRPC does.

    Raises:
        OSError: if no server listens.
    """
    # Ray's control store uses gRPC.
    with socket.create_connection((host, port), timeout=CONNECT_SECONDS) as connection:
        if os.environ.get("RAY_USE_TLS", "0") not in ("0", ""):
            # A TLS handshake would need Ray's certificates.
            return True
        try:
            connection.sendall(HTTP2_PREFACE + EMPTY_SETTINGS_FRAME)
            # A server must send its SETTINGS frame first (section 3.4), whatever it was sent.
            header = connection.recv(FRAME_HEADER_BYTES)
        except OSError:
            return False
        return len(header) == FRAME_HEADER_BYTES and header[FRAME_TYPE_OFFSET] == SETTINGS


def _reason(error: OSError) -> str:
    return (error.strerror or str(error) or type(error).__name__).lower()
