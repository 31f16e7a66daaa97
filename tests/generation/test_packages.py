"""What is said where a package of the extra is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.core.errors import PenstockError
from penstock.generation.chat import ChatTemplate
from penstock.generation.grammar import GrammarVocabulary
from penstock.generation.tokenizer import TextTokenizer
from tests.support.tokenizers import byte_tokenizer, gpt2_metadata


@pytest.mark.parametrize("package", ["tokenizers", "jinja2", "llguidance"])
def test_missing_package_names_the_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uses = {
        "tokenizers": lambda: TextTokenizer.of_gguf(gpt2_metadata()),
        "jinja2": lambda: ChatTemplate("{{ 1 }}"),
        "llguidance": lambda: GrammarVocabulary(byte_tokenizer()),
    }
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PenstockError, match=r"pip install 'penstock-runtime\[generate\]'"):
        uses[package]()


def test_modules_of_generation_import_none_of_the_packages() -> None:
    modules = ("options", "sampling", "tokenizer", "chat", "grammar", "gguf_vocabulary")
    program = (
        f"import sys; {'; '.join(f'import penstock.generation.{m}' for m in modules)}; "
        "sys.exit(bool({'tokenizers', 'jinja2', 'llguidance'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
