"""Something that listens where vLLM should, and is none: `garbage.py KIND serve MODEL … --port P …`."""

import socket
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


def main(kind: str, port: int) -> None:
    """`web`, `files`, `openai` speak HTTP; `noise` answers with bytes; `mute` says nothing."""
    if kind in ("web", "files", "openai"):
        Page.status = {"web": 200, "files": 404, "openai": 201}[kind]
        HTTPServer(("127.0.0.1", port), Page).serve_forever()
    listener = socket.create_server(("127.0.0.1", port))
    kept = []
    while True:
        connection, _ = listener.accept()
        kept.append(connection)
        if kind == "noise":
            connection.sendall(b"\x00\xff220 mail.example ESMTP\r\n" * 3)
            time.sleep(0.05)
            connection.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[sys.argv.index("--port") + 1]))
