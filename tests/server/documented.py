"""Requests that schemathesis makes from an OpenAPI document, and what it says of the answers.

Imported by the tests that need it: each process would take two seconds for schemathesis when it collects.
"""

from collections.abc import Iterator
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import APIOperation, Case, CheckContext, GenerationMode
from schemathesis.core.failures import Failure
from schemathesis.core.transport import Response
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.patience import PATIENCE_S

PROMISED = (502, 503, 504, 507)  # errors of the server that the document promises


def no_broken_promise(ctx: CheckContext, response: Response, case: Case) -> bool | None:
    """No error of the server but those that it promises."""
    if response.status_code >= 500 and response.status_code not in PROMISED:
        raise Failure(
            operation=case.operation.label,
            title="Server error",
            message=f"{response.status_code}: {response.content[:500]!r}",
        )
    return None


CHECKS: list[Any] = [
    no_broken_promise,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


def operations(base: str) -> Iterator[APIOperation[Any, Any, Any, Any]]:
    """Every operation in the document of a server."""
    schema = schemathesis.openapi.from_url(f"{base}/openapi.json", timeout=PATIENCE_S)
    for found in schema.get_all_operations():
        yield found.ok()


def without_body(operation: APIOperation[Any, Any, Any, Any]) -> bool:
    return not operation.body.items


def try_out(
    operation: APIOperation[Any, Any, Any, Any], mode: GenerationMode, examples: int, base: str | None = None
) -> int:
    """Send that many requests and check the answers; how many there were. `base`: to another server."""
    sent = 0

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def send(case: Case) -> None:
        nonlocal sent
        sent += 1
        case.call_and_validate(base_url=base, checks=CHECKS, timeout=PATIENCE_S)

    send()
    return sent
