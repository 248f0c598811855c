"""The public interface: what `import windlass` exports."""

import inspect
import subprocess
import sys

import windlass


def test_every_public_name_exists_and_is_documented() -> None:
    for name in windlass.__all__:
        value = getattr(windlass, name)
        assert inspect.getdoc(value), name


def test_every_public_function_documents_what_it_raises() -> None:
    members = [getattr(windlass, name) for name in windlass.__all__]
    for function in filter(inspect.isfunction, members):
        if function.__name__ not in ("runs", "models", "keys"):  # they raise nothing
            assert "Raises:" in (inspect.getdoc(function) or ""), function.__name__


def test_the_interface_is_imported_when_it_is_first_used() -> None:
    code = (
        "import sys, windlass; assert 'windlass.api' not in sys.modules; windlass.report;"
        "import windlass.models, windlass.report; assert callable(windlass.report);"
        "assert callable(windlass.models); assert 'torch' not in sys.modules"
    )
    subprocess.run((sys.executable, "-c", code), check=True)


def test_keys_are_found_by_their_meaning() -> None:
    assert "train.learning_rate" in windlass.keys("rate")
    assert all("seed" in f"{key} {text}".lower() for key, text in windlass.keys("seed").items())
    assert "train.seed" in windlass.keys("seed")
