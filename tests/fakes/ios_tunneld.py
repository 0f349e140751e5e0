"""A fake tunneld: its list of tunnels over HTTP, each leading to a fake phone."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from devices.ios.tunneld import TunneldAddress
from tests.fakes.ios_phone import ServedIphone


class FakeTunneld:
    """Tunnels to phones that may come and go: `phones` is read at each request."""

    def __init__(self, phones: Sequence[ServedIphone]) -> None:
        self.phones = list(phones)
        self.body: bytes | None = None
        """Sent in the place of the list."""
        self.drips = False
        """A byte at a time, and no end."""
        self._ended = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(outer.tunnels()).encode() if outer.body is None else outer.body
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if not outer.drips:
                    self.wfile.write(body)
                    return
                with suppress(OSError):
                    while not outer._ended.wait(0.2):
                        self.wfile.write(b" ")

            def log_message(self, *_: object) -> None:
                """Not to the test's output."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def address(self) -> TunneldAddress:
        return TunneldAddress("127.0.0.1", self._server.server_address[1])

    def tunnels(self) -> dict[str, list[dict[str, object]]]:
        return {
            served.phone.udid: [
                {"tunnel-address": "127.0.0.1", "tunnel-port": served.rsd_port, "interface": f"fake-{n}"}
            ]
            for n, served in enumerate(self.phones)
        }

    def __enter__(self) -> FakeTunneld:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
