"""transformers' progress bars as ours: told instead of drawn."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging

WEIGHTS = "Loading weights"  # the bar over a checkpoint's weights, the only one that takes long

_hugging: Any = logging  # only partly typed


class _Bar:
    """What transformers takes for a bar over `items`; `tell` hears the share that is done."""

    def __init__(self, items: Iterable[Any], count: int, tell: Callable[[float], None]) -> None:
        self._items = items
        self._count = max(count, 1)
        self._tell = tell

    def __iter__(self) -> Iterator[Any]:
        told = -1
        for index, item in enumerate(self._items):
            percent = 100 * index // self._count
            if percent != told:
                told = percent
                self._tell(index / self._count)
            yield item

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_args, **_options: None  # set_postfix, close, …


@contextmanager
def told(tell: Callable[[float], None]) -> Iterator[None]:
    """Tell `tell` the share of the weights that are loaded, and draw nothing, while inside."""

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if options.get("desc") != WEIGHTS or not args or not hasattr(args[0], "__len__"):
            return factory(*args, **options)
        return _Bar(args[0], len(args[0]), tell)

    shown, before = _hugging.is_progress_bar_enabled(), _hugging.set_tqdm_hook(hook)
    _hugging.disable_progress_bar()
    try:
        yield
    finally:
        _hugging.set_tqdm_hook(before)
        if shown:
            _hugging.enable_progress_bar()
