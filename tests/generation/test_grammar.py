"""Texts that have the form of a grammar, whatever the model says."""

from __future__ import annotations

import json
import re
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from penstock.core.errors import InvalidInput, RunError
from penstock.generation.grammar import GrammarVocabulary, TokenGrammar
from penstock.generation.options import GenerationOptions
from penstock.generation.sampling import TokenSampler
from penstock.generation.tokenizer import TextTokenizer
from tests.support.tokenizers import byte_tokenizer, trained_tokenizer
from tests.support.word_texts import letter_tokenizer

SIZE = 512  # of the logits: more than there are tokens
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(byte_tokenizer(), SIZE)


def written(
    vocabulary: GrammarVocabulary, options: GenerationOptions, seed: int, most: int = 300
) -> str:
    """What a model of random logits writes."""
    assert options.constraint is not None
    grammar = TokenGrammar(vocabulary, *options.constraint)
    sampler = TokenSampler(options, SIZE)
    rng, tokens = np.random.default_rng(seed), []
    while len(tokens) < most:
        logits = rng.standard_normal(SIZE).astype(np.float32)
        token = sampler.choose(logits, tokens, len(tokens), grammar.mask()).token
        grammar.accept(token)
        if token in byte_tokenizer().end_ids:
            assert grammar.is_finished
            break
        tokens.append(token)
    return byte_tokenizer().decode(tokens)


@given(seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 1.0]))
def test_random_model_with_schema_writes_json_of_it(
    vocabulary: GrammarVocabulary, seed: int, temperature: float
) -> None:
    schema = {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}
    options = GenerationOptions(json_schema=schema, temperature=temperature, seed=seed)
    value = json.loads(written(vocabulary, options, seed))
    assert value.keys() == {"name", "age", "tags"}
    assert len(value["name"]) <= 5
    assert 0 <= value["age"] <= 150
    assert {*value["tags"]} <= {"a", "b"}


@given(seed=st.integers(0, 2**32))
def test_random_model_with_expression_writes_what_it_matches(
    vocabulary: GrammarVocabulary, seed: int
) -> None:
    options = GenerationOptions(regex="(yes|no), [a-c]{2,4}!")
    assert re.fullmatch("(yes|no), [a-c]{2,4}!", written(vocabulary, options, seed))


@given(seed=st.integers(0, 2**32))
def test_random_model_with_lark_grammar_writes_what_it_has(
    vocabulary: GrammarVocabulary, seed: int
) -> None:
    options = GenerationOptions(grammar='start: "<" inner ">"\ninner: /[a-z]{1,3}/ | start')
    assert re.fullmatch("(<+)[a-z]{1,3}(>+)", written(vocabulary, options, seed, 4000))


def allowed(grammar: TokenGrammar) -> set[int]:
    bits = np.unpackbits(grammar.mask().view(np.uint8), bitorder="little")
    return {int(i) for i in bits.nonzero()[0]}


def test_mask_has_words_for_all_logits(vocabulary: GrammarVocabulary) -> None:
    mask = TokenGrammar(vocabulary, "regex", "a").mask()
    assert (mask.shape, mask.dtype) == ((SIZE // 32,), np.dtype(np.uint32))


def test_end_token_is_allowed_where_text_may_end(vocabulary: GrammarVocabulary) -> None:
    (a,), (b,) = byte_tokenizer().encode("a"), byte_tokenizer().encode("b")
    grammar = TokenGrammar(vocabulary, "regex", "ab?")
    assert allowed(grammar) & {1, a, b} == {a}
    grammar.accept(a)
    assert (grammar.is_finished, allowed(grammar)) == (False, {1, b})
    grammar.accept(b)
    assert (grammar.is_finished, allowed(grammar)) == (True, {1})
    grammar.accept(1)
    assert grammar.is_finished


def test_tokens_taken_back_may_follow_again(vocabulary: GrammarVocabulary) -> None:
    a, b = byte_tokenizer().encode("xb")
    grammar = TokenGrammar(vocabulary, "regex", "xb")
    assert grammar.accepted([a, b, b]) == 2
    copy = grammar.copy()
    grammar.accept(a)
    grammar.take_back(1)
    assert allowed(grammar) == allowed(copy) != set()


def test_forced_tokens_are_those_of_the_only_text(vocabulary: GrammarVocabulary) -> None:
    grammar = TokenGrammar(vocabulary, "regex", "hello world[0-9]")
    forced = byte_tokenizer().decode(grammar.forced())
    assert "hello world".startswith(forced)


def test_token_that_may_not_follow_raises(vocabulary: GrammarVocabulary) -> None:
    grammar = TokenGrammar(vocabulary, "regex", "a")
    with pytest.raises(InvalidInput, match="doesn't satisfy the grammar") as error:
        grammar.accept(byte_tokenizer().encode("b")[0])
    assert "<state>" not in str(error.value)
    assert not grammar.is_finished


@pytest.mark.parametrize(
    ("form", "text", "message"),
    [
        ("json_schema", "{", "json_schema: Expecting"),
        ("json_schema", "[1]", "object or boolean"),
        ("json_schema", '{"type": "objec"}', "objec"),
        ("json_schema", "[" * 100_000, "json_schema"),
        ("json_schema", '{"enum": [{"a": -9223372036854775808}]}', "least integer of 64 bits"),
        ("json_schema", '{"const": -9223372036854775807}', "least integer of 64 bits"),
        ("regex", "a" * 300_000, "has 300,000 letters"),
        ("regex", "(a", "unclosed group"),
        ("grammar", "start: nothing", "nothing"),
        ("xml", "<a>", "no form"),
    ],
)
def test_wrong_grammar_raises_with_its_message(
    vocabulary: GrammarVocabulary, form: str, text: str, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        TokenGrammar(vocabulary, form, text)


# Without room for them, these ended the process.
CHAINS = {
    "grammar": "start: r0\n" + "".join([f"r{i}: r{i + 1}\n" for i in range(9000)]) + 'r9000: "a"',
    "json_schema": json.dumps(
        {
            "$ref": "#/$defs/0",
            "$defs": {
                **{
                    str(i): {"properties": {"a": {"$ref": f"#/$defs/{i + 1}"}}} for i in range(3500)
                },
                "3500": {"type": "null"},
            },
        }
    ),
}


@pytest.mark.parametrize("form", CHAINS)
def test_long_chain_of_rules_is_compiled(vocabulary: GrammarVocabulary, form: str) -> None:
    before = threading.stack_size()
    grammar = TokenGrammar(vocabulary, form, CHAINS[form])
    assert grammar.mask().any()
    assert threading.stack_size() == before


def test_letters_that_no_token_has_are_named_as_the_cause() -> None:
    grammar = TokenGrammar(GrammarVocabulary(letter_tokenizer()), "regex", "é+")
    with pytest.raises(RunError, match="no token of the vocabulary may follow"):
        grammar.mask()


def test_grammars_of_one_text_are_compiled_once(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    original = GrammarVocabulary._compile

    def counting(self: GrammarVocabulary, form: str, text: str) -> object:
        compiled.append(text)
        return original(self, form, text)

    monkeypatch.setattr(GrammarVocabulary, "_compile", counting)
    one = TokenGrammar(vocabulary, "regex", "once")
    one.accept(byte_tokenizer().encode("o")[0])
    other = TokenGrammar(vocabulary, "regex", "once")
    assert compiled == ["once"]
    assert allowed(other) != allowed(one)
    for i in range(40):
        TokenGrammar(vocabulary, "regex", f"a{i}")
    TokenGrammar(vocabulary, "regex", "once")
    assert compiled.count("once") == 2  # fewer are kept


def test_vocabulary_of_tokenizer_without_ends_has_one() -> None:
    tokenizer = TextTokenizer(trained_tokenizer())
    (a,) = tokenizer.encode("a")
    grammar = TokenGrammar(GrammarVocabulary(tokenizer), "regex", "a?")
    (end,) = allowed(grammar) - {a}
    grammar.accept(end)
    assert grammar.is_finished


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [({"a": 0, "<0xMD>": 1}, "InvalidDigit"), ({"a": 0, "b": 2**31}, "token 2147483648 is beyond")],
)
def test_tokenizer_that_grammars_cannot_read_is_refused(
    vocabulary: dict[str, int], message: str
) -> None:
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback()])
    with pytest.raises(InvalidInput, match=rf"not fit for grammars: .*{message}"):
        GrammarVocabulary(TextTokenizer(tokenizer))


@pytest.mark.parametrize("form", ["grammar", "json_schema", "regex"])
def test_grammar_with_half_of_a_surrogate_pair_is_refused(
    vocabulary: GrammarVocabulary, form: str
) -> None:
    with pytest.raises(InvalidInput, match=f"{form}: "):
        TokenGrammar(vocabulary, form, '{"const": "\ud800"}')
