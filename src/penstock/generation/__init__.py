"""Text generation: tokens and sampling, chat templates, grammars, and many requests at once.

::

    from penstock.generation import Generator

    generator = Generator("model.gguf")
    print(generator.generate("Once upon a time", max_tokens=50).text)
"""

from __future__ import annotations

from penstock.generation.generator import Generator
from penstock.generation.options import GenerationOptions
from penstock.generation.result import GeneratedText, Generation, TextPiece, TokenLogprob
from penstock.generation.tokenizer import TextTokenizer

__all__ = [
    "GeneratedText",
    "Generation",
    "GenerationOptions",
    "Generator",
    "TextPiece",
    "TextTokenizer",
    "TokenLogprob",
]
