"""The public face: what `import windlass` gives."""

import inspect

import windlass


def test_every_public_name_is_there_and_documented() -> None:
    for name in windlass.__all__:
        value = getattr(windlass, name)
        assert inspect.getdoc(value), name


def test_every_public_function_documents_what_it_raises() -> None:
    verbs = [getattr(windlass, name) for name in windlass.__all__]
    for verb in filter(inspect.isfunction, verbs):
        if verb.__name__ != "runs":  # reads what is readable, and leaves out the rest
            assert "Raises:" in (inspect.getdoc(verb) or ""), verb.__name__
