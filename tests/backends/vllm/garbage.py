"""Something that listens where vLLM should, and is none: `garbage.py KIND … --uds PATH …`, or `--port P`."""

import socket
import socketserver
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer


class Page(BaseHTTPRequestHandler):
    """A web server: every page is there (`web`), or none (`files`)."""

    status = 200

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models" and self.status == 201:
            data, status = b'{"object": "list", "data": [{"id": "gpt", "object": "model"}]}', 200
        else:
            data, status = b"<html>hello</html>", min(self.status, 200) if self.status != 404 else 404
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class UnixServer(HTTPServer):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)


def main(kind: str, flags: list[str]) -> None:
    """`web`, `files`, `openai` speak HTTP; `noise` answers with bytes; `mute` says nothing."""
    door = flags[flags.index("--uds") + 1] if "--uds" in flags else ""
    port = 0 if door else int(flags[flags.index("--port") + 1])
    if kind in ("web", "files", "openai"):
        Page.status = {"web": 200, "files": 404, "openai": 201}[kind]
        if door:
            UnixServer(door, Page).serve_forever()  # type: ignore[arg-type]
        HTTPServer(("127.0.0.1", port), Page).serve_forever()
    listener = socket.socket(socket.AF_UNIX) if door else socket.socket()
    listener.bind(door or ("127.0.0.1", port))
    listener.listen()
    kept = []
    while True:
        connection, _ = listener.accept()
        kept.append(connection)
        if kind == "noise":
            connection.sendall(b"\x00\xff220 mail.example ESMTP\r\n" * 3)
            time.sleep(0.05)
            connection.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
