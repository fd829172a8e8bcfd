"""The public names: each one exists, and nothing else is promised."""

import inspect

import snugvl


def test_every_public_name_exists_and_is_documented() -> None:
    for name in snugvl.__all__:
        value = getattr(snugvl, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"{name} has no docstring"


def test_lazy_names_are_all_public() -> None:
    assert set(snugvl._LAZY) <= set(snugvl.__all__)
    assert dir(snugvl) == sorted(snugvl.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(snugvl, "nonsense")


def test_the_exception_tree_in_the_docstring_is_the_real_one() -> None:
    """Name, HTTP status and exit code of every exception, as drawn in `errors`."""
    doc = inspect.getdoc(snugvl.errors) or ""
    drawn = {}
    for line in doc.splitlines():
        words = line.replace("│", " ").replace("├──", " ").replace("└──", " ").split()
        if len(words) >= 3 and words[1].isdigit() and words[2].isdigit():
            drawn[words[0]] = (int(words[1]), int(words[2]))
    real = {
        name: (value.http_status, value.exit_code)
        for name, value in vars(snugvl.errors).items()
        if inspect.isclass(value) and issubclass(value, snugvl.SnugvlError)
    }
    assert drawn == real
