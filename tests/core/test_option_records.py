"""Records of options as the parameters of functions."""

from __future__ import annotations

import inspect

from penstock.core.option_records import document, help_of, option, option_names, takes
from penstock.core.records import KW_ONLY, dataclass


@dataclass(frozen=True)
class Options:
    size: int = option(3, "How large it is.", lambda x: isinstance(x, int))
    _: KW_ONLY
    name: str = option("a", "What it is called.")


@takes(Options)
def build(model: str, *arguments: object, **options: object) -> Options:
    """Build something."""
    return Options(*arguments, **options)  # type: ignore[arg-type]


def test_function_has_the_signature_of_the_record_behind_its_own_parameter() -> None:
    parameters = inspect.signature(build).parameters
    assert [*parameters] == ["model", "size", "name"]
    assert parameters["size"].default == 3
    assert parameters["name"].kind is inspect.Parameter.KEYWORD_ONLY
    assert build("m", 5, name="b") == Options(5, name="b")


def test_function_documents_each_option() -> None:
    assert build.__doc__ == f"Build something.\n\n{document(Options)}"
    assert "``size``: How large it is.\n\n``name``: What it is called." in build.__doc__
    assert help_of(Options, "name") == "What it is called."
    assert option_names(Options) == ["size", "name"]
