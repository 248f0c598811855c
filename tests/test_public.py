"""The public interface: what `import windlass` exports."""

import inspect

import windlass


def test_every_public_name_exists_and_is_documented() -> None:
    for name in windlass.__all__:
        value = getattr(windlass, name)
        assert inspect.getdoc(value), name


def test_every_public_function_documents_what_it_raises() -> None:
    members = [getattr(windlass, name) for name in windlass.__all__]
    for function in filter(inspect.isfunction, members):
        if function.__name__ != "runs":  # lists the readable runs, and raises nothing
            assert "Raises:" in (inspect.getdoc(function) or ""), function.__name__
