"""A kernel is read after all that it calls, so that its key does not depend on what was read before."""

import pytest
import triton.language as tl
from triton.runtime import JITFunction

from snugvl.layers.kernels.compiler import launch

FORMAT = tl.constexpr(2)


def innermost(x):  # type: ignore[no-untyped-def]
    return x * FORMAT


inner = JITFunction(innermost)


def outer(x):  # type: ignore[no-untyped-def]
    return inner(x) + tl.sum(inner(x), 0)


def kernel(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    tl.store(x, called(tl.load(x)) + inner(SIZE))


called = JITFunction(outer)


def test_what_a_kernel_calls_is_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, begun = JITFunction(kernel), list[str]()
    key = JITFunction.cache_key.fget

    def noted(function: JITFunction) -> str:
        begun.append(function.fn.__name__)
        made: str = key(function)
        return made

    monkeypatch.setattr(JITFunction, "cache_key", property(noted))
    for function in (inner, called):
        function.hash = None
    launch.read(whole)
    order = list(dict.fromkeys(begun))
    assert [name for name in order if name in ("innermost", "outer", "kernel")] == [
        "innermost",
        "outer",
        "kernel",
    ]
    assert whole.hash is not None
    if "sum" in order:  # the interpreter of other tests has a function of its own there
        assert order.index("sum") < order.index("outer")
    begun.clear()
    launch.read(whole)
    assert begun == ["kernel"], "once is enough"
