"""Talking to the Hub, or to whoever answers at HF_ENDPOINT: every answer is bounded, every failure one line.

Over huggingface_hub's session (proxies, certificates, saved tokens), but with our own reading of the answers:
its own reads listings, errors and the bodies of redirects whole, however long they are.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from snugvl.errors import CheckpointError, CheckpointNotFound

MAX_REDIRECTS = 10


class HubUnreachable(CheckpointError):
    """No network, no answer in time, or a Hub in trouble: what is known without it may still serve."""


class HubRefused(CheckpointError):
    """The repository is gated or private, and we may not read it."""


@contextmanager
def asking(where: str, url: str, headers: dict[str, str], timeout: float) -> Iterator[Any]:
    """The answer to a GET, redirects followed, its body not read yet.

    The token stays with the host that it is for: the session takes it out of what goes to another one.

    Raises:
        CheckpointError: in one line about `where`; also for what breaks while the body is read.
    """
    from huggingface_hub import get_session

    with speaking(where):
        session = get_session()
        request = session.build_request("GET", url, headers=headers, timeout=timeout)
        for _ in range(MAX_REDIRECTS):
            answer = session.send(request, stream=True, follow_redirects=False)
            try:
                if answer.next_request is None:
                    _check(where, answer)
                    yield answer
                    return
                request = answer.next_request
            finally:
                answer.close()
        raise CheckpointError(f"{where}: over {MAX_REDIRECTS} redirects; is HF_ENDPOINT a Hub?")


def read(where: str, answer: Any, limit: int, seconds: float) -> bytes:
    """The body of an answer: at most `limit` bytes, in at most `seconds`.

    Raises:
        CheckpointError: it is longer.
        HubUnreachable: it takes longer.
    """
    end = time.monotonic() + seconds
    data = bytearray()
    for chunk in answer.iter_raw():
        data += chunk
        if len(data) > limit:
            raise CheckpointError(f"{where}: more than the {limit:,} bytes came that were asked for")
        if time.monotonic() > end:
            raise HubUnreachable(
                f"{where}: the Hub sent {len(data):,} bytes in {seconds:.0f} s; try again later"
            )
    return bytes(data)


@contextmanager
def speaking(what: str) -> Iterator[None]:
    """Turns every way in which a conversation with the Hub fails into one line about `what`."""
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except errors.OfflineModeIsEnabled:
        raise HubUnreachable(f"{what}: HF_HUB_OFFLINE forbids to ask the Hub; unset it") from None
    except httpx2.TimeoutException:
        raise HubUnreachable(f"{what}: the Hub didn't answer in time; try again later") from None
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise HubUnreachable(f"{what}: the Hub can't be reached ({reason}); is there a network?") from None
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
        raise not_the_hub(what) from None


def not_the_hub(what: str) -> CheckpointError:
    """Somebody else answers."""
    return CheckpointError(
        f"{what}: the answer is not the Hub's; is a proxy or a login page between here and the Hub?"
    )


def _check(what: str, answer: Any) -> None:
    """Refuse an answer that isn't what was asked for, without reading what it says about it.

    Raises:
        CheckpointNotFound, HubRefused, HubUnreachable, CheckpointError: as its status and X-Error-Code say.
    """
    status, code = answer.status_code, answer.headers.get("X-Error-Code")
    if status in (200, 206):
        coding = answer.headers.get("Content-Encoding", "identity").strip().lower()
        if coding not in ("", "identity"):  # it was asked to come as it is: what is compressed has no bounds
            raise CheckpointError(f"{what}: the answer came compressed; is HF_ENDPOINT a Hub?")
        return
    invalid = answer.headers.get("X-Error-Message") == "Invalid credentials in Authorization header"
    if status >= 400 and code == "GatedRepo":
        raise HubRefused(
            f"{what} is gated: accept its licence on its page at the Hub, then set HF_TOKEN to your token"
        )
    if status >= 400 and (code == "RepoNotFound" or (code is None and status == 401 and not invalid)):
        raise CheckpointNotFound(
            f"no model {what} on the Hub, or it is private; check the name, or set HF_TOKEN to a token "
            "that may read it"
        )
    if status >= 400 and code == "RevisionNotFound":
        raise CheckpointNotFound(f"{what} has no such revision on the Hub; check --revision")
    if status >= 400 and code == "EntryNotFound":
        raise CheckpointError(f"{what} is not on the Hub, although its listing names it")
    raise _refusal(what, status, answer.headers.get("Retry-After"))


def _refusal(what: str, status: int, retry_after: str | None) -> CheckpointError:
    if status in (401, 403):
        return HubRefused(f"{what}: the Hub refuses ({status}); set HF_TOKEN to a token that may read it")
    if status == 429:
        short = retry_after and retry_after.isdecimal() and len(retry_after) < 6
        wait = f" in {retry_after} s" if short else " later"
        return HubUnreachable(f"{what}: too many requests to the Hub (429); try again{wait}, or set HF_TOKEN")
    if status >= 500:
        return HubUnreachable(f"{what}: the Hub has a problem ({status}); try again later")
    return CheckpointError(f"{what}: the Hub answers with status {status}")
