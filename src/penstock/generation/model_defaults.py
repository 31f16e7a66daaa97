"""Defaults of the options of requests: what the files beside a model say of its texts.

``generation_config.json`` has the options of ``generate`` of Hugging Face's transformers that a
model's authors chose, such as a beam search for summaries. Older models have them in
``config.json``, and those of ONNX Runtime's model builder in ``genai_config.json``, under
"search". Options that a request gives take precedence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from penstock.core.errors import InvalidInput, InvalidModel, shortened, warn
from penstock.generation.options import PRECEDENCE, GenerationOptions
from penstock.generation.tokenizer import read_json

_FILES = (("generation_config.json", ""), ("genai_config.json", "search"), ("config.json", ""))
"""files, and the entry that has the settings, or none if the whole object does"""
_ALIKE = (
    *("top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "max_length", "min_length"),
    *("length_penalty", "early_stopping"),
)
_NAMED = {
    "num_beams": "beams",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "forced_eos_token_id": "forced_end_ids",
    "stop_strings": "stop",
}
_TOP_K = 50
"""what transformers draws from unless a file has another number"""
# Settings that are not followed, with the values that change nothing.
_OF_DRAWING = {"typical_p": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "top_h": ()}
_OTHERS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("penalty_alpha", "diversity_penalty", "renormalize_logits"), (0,)),
    **dict.fromkeys(("guidance_scale", "num_beam_groups", "num_return_sequences"), (1,)),
    "encoder_repetition_penalty": (1,),
    **dict.fromkeys(("exponential_decay_length_penalty", "dola_layers"), ()),
    **dict.fromkeys(("sequence_bias", "force_words_ids", "constraints", "watermarking_config"), ()),
}


def generation_settings(folders: Sequence[Path]) -> tuple[Mapping[str, object], str]:
    """Return the settings in the first file that has some, and its name. Raises ``InvalidModel`` if
    a file is not in its format.

    Args:
        folders: Folders of files beside a model; earlier ones take precedence.
    """
    for folder in folders:
        for name, entry in _FILES:
            content: object = read_json(folder / name)
            if entry and isinstance(content, Mapping):
                content = content.get(entry)
            if isinstance(content, Mapping) and content:
                return content, str(folder / name)
    return {}, ""


def default_options(
    folders: Sequence[Path], ends: Collection[int], forced: int | None
) -> dict[str, object]:
    """Return the fields of ``GenerationOptions`` that files give. Warns of settings that are not
    followed. Raises ``InvalidModel`` for impossible values.

    Args:
        folders: Folders of files beside a model; earlier ones take precedence.
        ends: The tokens that end a text.
        forced: The tokens of ``forced_bos_token_id``, which transformers counts as tokens of the
            text; None for a decoder alone.
    """
    settings, place = generation_settings(folders)
    known = {name: value for name, value in settings.items() if value is not None}
    options = {name: known[name] for name in _ALIKE if name in known}
    options |= {name: known[other] for other, name in _NAMED.items() if other in known}
    # As in transformers, counts of new tokens take precedence over lengths.
    for name, other in PRECEDENCE.items():
        if name in options:
            options.pop(other, None)
    draws, searches = known.get("do_sample") is True, known.get("num_beams", 1) != 1
    ignored = [name for name, own in _OTHERS.items() if _differs(known, name, own)]
    # A search that draws is not supported: one without draws is closer than a text without it.
    if searches:
        options["temperature"] = 0.0
        ignored += ["do_sample"] if draws else []
    elif draws:
        options["temperature"] = known.get("temperature", 1.0)
        options.setdefault("top_k", _TOP_K)
        ignored += [name for name, own in _OF_DRAWING.items() if _differs(known, name, own)]
    # transformers forces it behind prompts of one token only.
    if forced is None and "forced_bos_token_id" in known:
        ignored.append("forced_bos_token_id")
    if ignored:
        values = ", ".join([f"{name}={shortened(repr(known[name]))}" for name in ignored])
        warn(
            f"{place} has settings that are not followed: {values}. Texts differ from those of "
            "transformers; remove the settings to end this warning"
        )
    _fit(options, ends, forced or 0)
    # Here, so that the file is named once, and not each request refused.
    try:
        GenerationOptions(**options)  # type: ignore[arg-type]
    except (InvalidInput, TypeError) as error:
        raise InvalidModel(f"{place}: {error}") from error
    return options


def _fit(options: dict[str, object], ends: Collection[int], forced: int) -> None:
    """Change values of files to those of ``GenerationOptions``, which counts no forced tokens."""
    for name in ("min_tokens", "max_tokens"):
        count = options.get(name)
        if isinstance(count, int):
            options[name] = max(count - forced, 0)
    last, words = options.get("forced_end_ids"), options.get("bad_words_ids")
    if isinstance(last, int):
        options["forced_end_ids"] = [last]
    if isinstance(words, list):
        # As in transformers, a word may not forbid that texts end.
        options["bad_words_ids"] = [word for word in words if word not in [[n] for n in ends]]


def _differs(known: Mapping[str, object], name: str, neutral: Sequence[object]) -> bool:
    return name in known and known[name] not in neutral
