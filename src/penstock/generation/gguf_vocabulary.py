"""Tokenizers built from the vocabulary in the metadata of a GGUF file.

Two kinds are supported: GPT-2's byte pairs (``tokenizer.ggml.model`` is "gpt2"), if the file
names the pre-tokenizer (``tokenizer.ggml.pre``), and SentencePiece's pairs by scores, with
single bytes for text without a token ("llama"). Names and patterns are those of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.core.errors import InvalidModel, extra_needed, quoted

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

_PREFIX = "tokenizer.ggml."
# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "▁"  # SentencePiece's mark of a space

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SIGN = r"[^\r\n\p{L}\p{N}]?"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"{_SIGN}[{_UPPER}]*[{_LOWER}]+|{_SIGN}[{_UPPER}]+[{_LOWER}]*|\p{{N}}|{_SIGNS}"
)  # fmt: skip
_GPT4O = (
    rf"{_SIGN}[{_UPPER}]*[{_LOWER}]+{_ENGLISH}?|{_SIGN}[{_UPPER}]+[{_LOWER}]*{_ENGLISH}?"
    rf"|\p{{N}}{{1,3}}|{_SIGNS}"
)
_CJK = "[一-龥\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CODER_CJK = "[一-龥\u0800-一가-\ud7ff]+"

# Patterns that split text, one after another, before pairs are merged, by names of pre-tokenizers.
_DIVISIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "default gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum",
        (_GPT2,),
    ),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", (r"\p{N}", _GPT2)),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe glm4 "
        "chatglm-bpe",
        (_LLAMA3,),
    ),
    ("qwen2 deepseek-r1-qwen kormo stablelm2 hunyuan solar-open megrez grok-2", (_QWEN2,)),
    ("qwen35", (_QWEN35,)),
    ("tekken", (_TEKKEN,)),
    ("gpt-4o llama4 minimax-m2", (_GPT4O,)),
    ("deepseek-v3 hunyuan-dense", (r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
    ("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CODER_CJK, r"\p{N}")),
    ("falcon", (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
)
# Pre-tokenizers that first look up parts as whole tokens, and begin texts with a token.
_WHOLE = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"}
# Control tokens that end a text whatever else the file says.
_ENDS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>"),
    *("<|endoftext|>", "<|end_of_text|>", "<EOT>", "<|return|>", "<|call|>", "<|endofturn|>"),
}


def gguf_tokenizer(metadata: Mapping[str, object]) -> Tokenizer:
    """Return the tokenizer that the metadata of a GGUF file describes. Raises ``InvalidModel`` if
    there is none, or one of an unknown kind."""
    kind = metadata.get(f"{_PREFIX}model")
    tokens = _texts(metadata, "tokens")
    if kind == "gpt2":
        tokenizer = _byte_pairs(metadata, tokens)
    elif kind == "llama":
        tokenizer = _scored_pairs(metadata, tokens)
    else:
        raise InvalidModel(
            f"{_PREFIX}model is {kind!r}: tokenizers of the kinds gpt2 and llama are known; give "
            "the tokenizer.json of the model"
        )
    with extra_needed("a tokenizer needs tokenizers", "generate"):
        from tokenizers import AddedToken
    types = _numbers(metadata, "token_type", len(tokens), 1)
    for types_, special in (((_CONTROL, _UNKNOWN), True), ((_USER_DEFINED,), False)):
        marked = [text for text, type_ in zip(tokens, types, strict=True) if type_ in types_]
        added = [AddedToken(text, special=special, normalized=False) for text in marked if text]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    _add_ends(tokenizer, metadata, tokens)
    return tokenizer


def gguf_chat_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    """Return the chat templates in the metadata of a GGUF file, by name."""
    key, templates = "tokenizer.chat_template", {}
    for name, text in metadata.items():
        if isinstance(text, str) and (name == key or name.startswith(f"{key}.")):
            templates[name[len(key) + 1 :] or "default"] = text
    return templates


def gguf_end_ids(metadata: Mapping[str, object]) -> list[int]:
    """Return the tokens that end a text, by the metadata of a GGUF file."""
    tokens = _texts(metadata, "tokens")
    types = _numbers(metadata, "token_type", len(tokens), 1)
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = [_token(metadata, name, tokens) for name in names]
    ends = [i for i, text in enumerate(tokens) if text in _ENDS and types[i] == _CONTROL]
    return sorted({token for token in (*named, *ends) if token is not None})


def gguf_start_id(metadata: Mapping[str, object]) -> int | None:
    """Return the token that a text begins with, by the metadata of a GGUF file."""
    return _token(metadata, "bos_token_id", _texts(metadata, "tokens"))


def gguf_end_id(metadata: Mapping[str, object]) -> int | None:
    """Return the token that templates write after a text, by the metadata of a GGUF file."""
    return _token(metadata, "eos_token_id", _texts(metadata, "tokens"))


def _byte_pairs(metadata: Mapping[str, object], tokens: Sequence[str]) -> Tokenizer:
    with extra_needed("a tokenizer needs tokenizers", "generate"):
        from tokenizers import Tokenizer, decoders, models
    division = metadata.get(f"{_PREFIX}pre", "default")
    pairs = [tuple(text.split(" ", 1)) for text in _texts(metadata, "merges")]
    merges = [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]
    vocabulary = {text: i for i, text in enumerate(tokens)}
    # For a result that is longer than all tokens, tokenizers ends in no exception that is one.
    joined = map("".join, merges)
    unknown = next((text for text in joined if text not in vocabulary), None)
    if unknown is not None:
        raise InvalidModel(f"{_PREFIX}merges: {quoted(unknown)} is no token of the file")
    try:
        model = models.BPE(vocabulary, merges, ignore_merges=division in _WHOLE)
    except Exception as error:  # tokenizers raises no other class
        raise InvalidModel(f"{_PREFIX}merges: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _division(division)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _division(name: object) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    patterns = next((p for names, p in _DIVISIONS if name in names.split()), None)
    if patterns is None:
        raise InvalidModel(
            f"{_PREFIX}pre is {name!r}, which is not known; give the tokenizer.json of the model"
        )
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*parts, letters])


def _scored_pairs(metadata: Mapping[str, object], tokens: Sequence[str]) -> Tokenizer:
    with extra_needed("a tokenizer needs tokenizers", "generate"):
        from tokenizers import Tokenizer, decoders, models, normalizers
    scores = _numbers(metadata, "scores", len(tokens), 0.0)
    vocabulary = {text: i for i, text in enumerate(tokens)}
    unknown = _token(metadata, "unknown_token_id", tokens)
    model = models.BPE(
        vocabulary,
        _merges(vocabulary, scores),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = bool(metadata.get(f"{_PREFIX}add_space_prefix", True))
    begins = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*begins, normalizers.Replace(" ", _SPACE)])
    spaces = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    strips = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([*spaces, *strips])
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the pairs that form a token, highest score first, as SentencePiece merges them."""
    pairs = []
    for text, i in vocabulary.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocabulary and right in vocabulary:
                pairs.append((-scores[i], i, vocabulary[left], left, right))
    pairs.sort()
    return [(left, right) for *_, left, right in pairs]


def _add_ends(tokenizer: Tokenizer, metadata: Mapping[str, object], tokens: Sequence[str]) -> None:
    """Let the tokenizer add tokens at the beginning and end of texts, as the file says."""
    from tokenizers.processors import TemplateProcessing

    starts = metadata[f"{_PREFIX}model"] == "llama" or metadata.get(f"{_PREFIX}pre") in _WHOLE
    start = _token(metadata, "bos_token_id", tokens)
    end = _token(metadata, "eos_token_id", tokens)
    template, named = ["$A"], []
    if start is not None and metadata.get(f"{_PREFIX}add_bos_token", starts):
        template.insert(0, "start")
        named.append(("start", start))
    if end is not None and metadata.get(f"{_PREFIX}add_eos_token", False):
        template.append("end")
        named.append(("end", end))
    if named:
        tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=named)


def _values(metadata: Mapping[str, object], name: str) -> Iterable[object] | None:
    values = metadata.get(_PREFIX + name)
    if values is None or (isinstance(values, Iterable) and not isinstance(values, str)):
        return values
    raise InvalidModel(f"{_PREFIX}{name} is not an array")


def _texts(metadata: Mapping[str, object], name: str) -> list[str]:
    values = _values(metadata, name)
    if values is None:
        raise InvalidModel(f"the metadata has no {_PREFIX}{name}: the file carries no vocabulary")
    if isinstance(values, list) and {*map(type, values)} <= {str}:
        return values  # in the types of the file
    texts = []
    for value in values:
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        if not isinstance(value, str):
            raise InvalidModel(f"{_PREFIX}{name} has {quoted(repr(value))}, which is not a text")
        texts.append(value)
    return texts


def _numbers(
    metadata: Mapping[str, object], name: str, count: int, default: float
) -> Sequence[float]:
    """Return an array with a number for each token, ``default`` if the file has none."""
    values = _values(metadata, name)
    if values is None:
        return [default] * count
    numbers = [value for value in values if isinstance(value, int | float)]
    if len(numbers) != count:
        raise InvalidModel(f"{_PREFIX}{name} has {len(numbers)} numbers for {count} tokens")
    return numbers


def _token(metadata: Mapping[str, object], name: str, tokens: Sequence[str]) -> int | None:
    value = metadata.get(_PREFIX + name)
    if value is None or (isinstance(value, int) and 0 <= value < len(tokens)):
        return value
    raise InvalidModel(f"{_PREFIX}{name} is {value!r}, which is none of {len(tokens):,} tokens")
