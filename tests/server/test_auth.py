"""Who may come in."""

import socket

import httpx
import pytest

from snugvl.server import access
from snugvl.server.settings import ServerSettings, is_loopback
from tests.patience import PATIENCE_S
from tests.server.fake import FakeService
from tests.server.live import live
from tests.server.raw import connect, head

KEYS = ServerSettings(api_keys=("first-key", "second-key"))
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer first-key"},
        {"authorization": "bearer  first-key"},
        {"x-api-key": "first-key"},
        {"api-key": "first-key"},
        {"x-api-key": "first-key", "api-key": "other"},
        {"Authorization": "Bearer second-key"},
        {"Authorization": "Basic abc", "x-api-key": "first-key"},
    ],
)
def test_any_key_opens(headers: dict[str, str]) -> None:
    with live(FakeService(), KEYS) as base:
        assert httpx.get(base + "/version", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({}, "no API key"),
        ({"Authorization": "Bearer"}, "the Authorization header holds no 'Bearer KEY'; send one as"),
        ({"Authorization": "first-key"}, "the Authorization header holds no 'Bearer KEY'; send one as"),
        ({"Authorization": "Bearer first-ke"}, "wrong"),
        ({"Authorization": "Bearer first-key2"}, "wrong"),
        ({"x-api-key": "FIRST-KEY"}, "wrong"),
        ({"api-key": "FIRST-KEY"}, "wrong"),
        ({"Authorization": "Bearer other", "x-api-key": "first-key"}, "wrong"),
    ],
)
def test_nothing_else_does(headers: dict[str, str], said: str) -> None:
    service = FakeService()
    with live(service, KEYS) as base:
        for method, path in (("POST", "/v1/chat/completions"), ("GET", "/memory"), ("GET", "/nowhere")):
            answer = httpx.request(method, base + path, headers=headers, json=CHAT)
            assert answer.status_code == 401
            assert said in answer.json()["error"]["message"]
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"].startswith("Bearer")
    assert not service.requests


@pytest.mark.parametrize("key", ["first-key", "second-key", "other-key"])
def test_every_key_is_compared_whichever_it_is(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long the comparison takes says nothing of which key it was, or how far it was right."""
    compared = []

    def noting(first: bytes, second: bytes) -> bool:
        compared.append((first, second))
        return first == second

    with live(FakeService(), KEYS) as base:
        monkeypatch.setattr(access.hmac, "compare_digest", noting)
        httpx.get(base + "/version", headers={"x-api-key": key})
    assert len(compared) == len(KEYS.api_keys)
    assert {len(digest) for pair in compared for digest in pair} == {32}


def test_every_route_but_health_and_the_page_is_guarded() -> None:
    with live(FakeService(), KEYS) as base:
        document = httpx.get(base + "/openapi.json", headers={"x-api-key": "first-key"}).json()
        for path, operations in document["paths"].items():
            for method in operations:
                status = httpx.request(method, base + path).status_code
                assert (status == 401) == (not path.startswith("/health")), f"{method} {path}: {status}"
        assert httpx.get(base + "/openapi.json").status_code == 401
        assert httpx.get(base + "/metrics").status_code == 401
        assert httpx.get(base + "/").status_code == 200


def test_the_body_of_a_stranger_is_not_waited_for() -> None:
    with live(FakeService(), KEYS) as base, connect(base, head(1_000_000)) as link:
        assert link.recv(65536).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "192.168.0.2", ""]
)
def test_a_rebound_name_is_refused(host: str) -> None:
    with live(FakeService()) as base:
        answer = httpx.get(base + "/version", headers={"host": host})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "forbidden"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST:1", "127.1.2.3"])
def test_loopback_names_are_ours(host: str) -> None:
    with live(FakeService()) as base:
        assert httpx.get(base + "/version", headers={"host": host}).status_code == 200


def test_a_wider_address_answers_to_any_name() -> None:
    with live(FakeService(), ServerSettings(host="0.0.0.0")) as base:
        assert httpx.get(base + "/version", headers={"host": "box.lan"}).status_code == 200


BROWSER = {"user-agent": "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"}


@pytest.mark.parametrize(
    "host", ["evil.example", "EVIL.example:8000", "evil.example.", "127.0.0.1.evil.example", "local.evil.com"]
)
@pytest.mark.parametrize("marks", [{"origin": "http://{host}"}, {"sec-fetch-site": "same-origin"}, BROWSER])
def test_a_rebound_page_gets_nothing_from_a_wider_address(host: str, marks: dict[str, str]) -> None:
    """Its own name was made to point here, so nothing it asks for is of another origin."""
    service = FakeService()
    headers = {"host": host, **{name: value.format(host=host) for name, value in marks.items()}}
    with live(service, ServerSettings(host="0.0.0.0")) as base:
        for method, path in (
            ("POST", "/v1/chat/completions"),
            ("GET", "/memory"),
            ("GET", "/"),
            ("HEAD", "/"),
        ):
            answer = httpx.request(method, base + path, headers=headers, json=CHAT)
            assert answer.status_code == 403, (method, path)
            assert method == "HEAD" or "--allow-origin http://" in answer.json()["error"]["message"]
    assert not service.requests


@pytest.mark.parametrize(
    "host",
    [
        "192.168.0.2:8000",
        "[fd00::2]:8000",
        "snugvl:8000",
        "box.lan",
        "box.local.",
        "host.docker.internal:8000",
    ],
)
def test_a_browser_is_answered_under_names_that_no_stranger_owns(host: str) -> None:
    with live(FakeService(), ServerSettings(host="0.0.0.0")) as base:
        headers = {"host": host, "origin": f"http://{host}", **BROWSER}
        assert httpx.get(base + "/memory", headers=headers).status_code == 200
        assert httpx.post(base + "/v1/chat/completions", json=CHAT, headers=headers).status_code == 200


def test_other_names_are_for_programs_for_keys_and_for_those_who_were_told() -> None:
    chat = "/v1/chat/completions"
    with live(FakeService(), ServerSettings(host="0.0.0.0")) as base:
        for program in ("OpenAI/Python 2.1", "node", "curl/8.5"):  # under whatever name a network gives us
            headers = {"host": "gpu.example.org", "user-agent": program, "sec-fetch-mode": "cors"}
            assert httpx.post(base + chat, json=CHAT, headers=headers).status_code == 200
    page = {"host": "gpu.example.org:8000", "origin": "http://gpu.example.org:8000", **BROWSER}
    told = ServerSettings(host="0.0.0.0", allow_origins=("http://gpu.example.org:8000",))
    with live(FakeService(), told) as base:
        assert httpx.post(base + chat, json=CHAT, headers=page).status_code == 200
        assert httpx.get(base + "/", headers={"host": page["host"], **BROWSER}).status_code == 200
        other = {**page, "origin": "http://evil.example"}
        assert httpx.post(base + chat, json=CHAT, headers=other).status_code == 403
    with live(FakeService(), ServerSettings(host="0.0.0.0", api_keys=("first-key",))) as base:
        headers = {**page, "x-api-key": "first-key"}
        assert httpx.post(base + chat, json=CHAT, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:1", "http://[", "file://"]
)
def test_a_foreign_page_may_not_post(origin: str) -> None:
    service = FakeService()
    with live(service) as base:
        answer = httpx.post(base + "/v1/chat/completions", json=CHAT, headers={"origin": origin})
        assert answer.status_code == 403
        assert "--allow-origin" in answer.json()["error"]["message"]
        assert "access-control-allow-origin" not in answer.headers
    assert not service.requests


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_a_foreign_page_may_change_nothing(method: str) -> None:
    with live(FakeService()) as base:
        for path in ("/api/delete", "/v1/models"):
            headers = {"origin": "https://evil.example"}
            assert httpx.request(method, base + path, headers=headers).status_code == 403


def test_our_own_page_may_post_and_so_may_programs_with_a_key() -> None:
    with live(FakeService()) as base:
        for origin in (base, base.upper()):
            assert httpx.post(base + "/tokenize", json={"prompt": "a"}, headers={"origin": origin}).is_success
    with live(FakeService(), KEYS) as base:
        headers = {"origin": "https://tool.example", "x-api-key": "first-key"}
        assert httpx.post(base + "/tokenize", json={"prompt": "a"}, headers=headers).is_success


PAGE = "https://example.org"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.mark.parametrize("keys", [(), ("first-key",)])
@pytest.mark.parametrize("allowed", [PAGE, "*"])
def test_a_page_that_is_allowed_may_ask(keys: tuple[str, ...], allowed: str) -> None:
    settings = ServerSettings(api_keys=keys, allow_origins=("http://localhost:3000", allowed))
    with live(FakeService(), settings) as base:
        url = base + "/v1/chat/completions"
        preflight = httpx.options(url, headers=PREFLIGHT)  # browsers send no key with it
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] in (PAGE, "*")
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        key = {"Authorization": "Bearer first-key"}
        answer = httpx.post(url, json=CHAT, headers={"Origin": PAGE, **key})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] in (PAGE, "*")
        for each in (preflight, answer):  # no cookie or password of the browser's goes with it
            assert "access-control-allow-credentials" not in each.headers
        assert "snugvl-warning" in answer.headers["access-control-expose-headers"]
        if keys:
            refused = httpx.post(url, json=CHAT, headers={"Origin": PAGE})
            assert refused.status_code == 401
            assert refused.headers["access-control-allow-origin"] in (PAGE, "*")  # the page can read why


def test_other_pages_are_refused_still() -> None:
    with live(FakeService(), ServerSettings(allow_origins=(PAGE,))) as base:
        url = base + "/v1/chat/completions"
        for origin in ("https://example.com", "http://example.org", PAGE + ".evil.net", "null"):
            preflight = httpx.options(url, headers={**PREFLIGHT, "Origin": origin})
            assert preflight.status_code == 400
            assert "--allow-origin" in preflight.json()["error"]["message"]
            assert "access-control-allow-origin" not in preflight.headers
            answer = httpx.post(url, json=CHAT, headers={"Origin": origin})
            assert answer.status_code == 403
            assert "--allow-origin" in answer.json()["error"]["message"]
            assert "access-control-allow-origin" not in answer.headers
        foreign = {**PREFLIGHT, "Origin": "http://example.org"}
        said = httpx.options(base + "/v1/messages", headers=foreign).json()
        assert said["type"] == "error"
        assert "--allow-origin" in said["error"]["message"]
        assert "--allow-origin" in httpx.options(base + "/api/chat", headers=foreign).json()["error"]
        other = httpx.options(url, headers={**PREFLIGHT, "Access-Control-Request-Method": "PATCH"})
        assert "'PATCH' is not answered; use GET, HEAD, POST, DELETE" in other.json()["error"]["message"]
        assert other.headers["access-control-allow-origin"] == PAGE
    with live(FakeService(), ServerSettings()) as base:
        assert httpx.options(base + "/v1/models", headers=PREFLIGHT).status_code == 405


@pytest.mark.parametrize(
    "path", ["/", "/health", "/version", "/v1/models", "/api/tags", "/openapi.json", "/memory"]
)
def test_head_is_answered_where_get_is(path: str) -> None:
    with live(FakeService(), ServerSettings()) as base:
        got, head_only = httpx.get(base + path), httpx.head(base + path)
        assert head_only.status_code == got.status_code
        assert head_only.headers["content-type"] == got.headers["content-type"]
        assert not head_only.content
        wrong = httpx.request("PATCH", base + path)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD")
        assert httpx.head(base + "/v1/chat/completions").status_code == 405


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "a.localhost", "127.9.9.9"])
def test_what_is_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", "", "localhost.evil.example"])
def test_what_is_not(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("version", "status"),
    [("1.0\r\n", 200), ("1.0\r\nHost: evil.example\r\n", 403), ("1.0\r\nHost:\r\n", 403), ("1.1\r\n", 403)],
)
def test_http_1_0_without_a_name_is_answered(version: str, status: int) -> None:
    """As HAProxy and others look whether a server is well; no browser sends it."""
    with live(FakeService()) as base:
        _, _, port = base.rpartition(":")
        with socket.create_connection(("127.0.0.1", int(port)), PATIENCE_S) as there:
            there.sendall(f"GET /health/live HTTP/{version}\r\n".encode())
            assert f" {status} ".encode() in there.recv(100)
