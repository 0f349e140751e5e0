"""A fake tunneld: its list of tunnels over HTTP, each leading to a fake phone."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from devices.ios.link import TunneldAddress
from tests.fakes.ios_phone import ServedIphone


class FakeTunneld:
    """Tunnels to phones that may come and go: `phones` is read at each request."""

    def __init__(self, phones: Sequence[ServedIphone]) -> None:
        self.phones = list(phones)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(outer.tunnels()).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

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
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
