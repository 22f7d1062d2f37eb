"""Files with mergeable ranks: tiktoken's (Llama 3 and 4, Kimi, Qwen) and Mistral's tekken.json.

tiktoken's file has a line per token: its bytes in base64, and its rank. How text is cut and which control strings there are is in the
code of each model, so families are known here, by the content of the file or by the names in its tokenizer_config.json:

    Llama 3   llama_models/llama3/tokenizer.py (llama-models 0.3)
    Llama 4   llama_models/llama4/tokenizer.py (llama-models 0.3)
    Kimi      tokenization_kimi.py beside moonshotai's tiktoken.model; its control strings are in tokenizer_config.json
    Qwen      tokenization_qwen.py beside Qwen-7B's qwen.tiktoken; text is brought into NFC first

For other files, tokenizer_config.json has to give `pat_str`, tiktoken's name for the expression, and `added_tokens_decoder`. A tekken.json
holds all of this itself; its control strings precede others and never match text (mistral_common/tokens/tokenizers/tekken.py).
"""

import base64
import binascii
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LLAMA3_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
LLAMA4_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI_PATTERN = r"[\p{Han}]+|" + LLAMA4_PATTERN.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace("/]*", "]*")

KIMI_RESERVED = 256
TEKKEN_CONTROLS = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
]  # fmt: skip
"""The control strings of a tekken.json that doesn't list any."""


@dataclass(frozen=True, slots=True, eq=False)
class RankFile:
    """A byte-level BPE by ranks.

    `content` is the file, `special` maps control strings to ids, `matched` is whether they are matched in text, `nfc` whether
    text is brought into that normal form first.
    """

    content: bytes
    ranks: Mapping[bytes, int]
    pattern: str
    special: Mapping[str, int]
    bos: int | None
    eos: int | None
    matched: bool = True
    nfc: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """Models whose rank files are read alike.

    `digest` is the SHA-256 of the file, `signs` are names in its configuration, either of which identifies the family; `special(first)`
    lists control strings from the id `first` on.
    """

    pattern: str
    special: Callable[[int], Sequence[str]]
    bos: str | None
    eos: str
    digest: str | None
    signs: tuple[str, ...]
    nfc: bool = False


def _reserved(name: str, first: int, behind: int) -> list[str]:
    return [f"<|{name}reserved_special_token_{number}|>" for number in range(first, behind)]


LLAMA3_CONTROLS = [
    "<|begin_of_text|>", "<|end_of_text|>", *_reserved("", 0, 2), "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>", *_reserved("", 2, 246),
]  # fmt: skip

LLAMA4_CONTROLS = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|header_start|>", "<|header_end|>",
    "<|eom|>", "<|eot|>", "<|step|>", *_reserved("text_post_train_", 0, 6), "<|python_start|>", "<|python_end|>",
    "<|finetune_right_pad|>", *_reserved("text_post_train_", 8, 69), "<|image_start|>", "<|image_end|>", *_reserved("vision_", 0, 2),
    "<|tile_x_separator|>", "<|tile_y_separator|>", *_reserved("vision_", 2, 6), "<|image|>", *_reserved("vision_", 6, 7), "<|patch|>",
    *_reserved("vision_", 7, 1048), *_reserved("reasoning_", 0, 8), "<|reasoning_thinking_start|>", "<|reasoning_thinking_end|>",
    *_reserved("", 0, 904),
]  # fmt: skip

QWEN_CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205))]

FAMILIES = {
    "Llama 3": Family(
        LLAMA3_PATTERN, lambda _: LLAMA3_CONTROLS, "<|begin_of_text|>", "<|end_of_text|>",
        "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55", ("<|start_header_id|>",),
    ),
    "Llama 4": Family(
        LLAMA4_PATTERN, lambda _: LLAMA4_CONTROLS, "<|begin_of_text|>", "<|end_of_text|>",
        "d0bdbaf59b0762c8c807617e2d8ea51420eb1b1de266df2495be755c8e0ed6ed", ("<|header_start|>",),
    ),
    "Kimi": Family(
        KIMI_PATTERN, lambda first: [f"<|reserved_token_{first + number}|>" for number in range(KIMI_RESERVED)], "[BOS]", "[EOS]",
        None, ("tokenization_kimi.TikTokenTokenizer", "<|im_middle|>"),
    ),
    "Qwen": Family(
        QWEN_PATTERN, lambda _: QWEN_CONTROLS, None, "<|endoftext|>",
        "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186", ("tokenization_qwen.QWenTokenizer", "QWenTokenizer"),
        nfc=True,
    ),
}  # fmt: skip


def tiktoken_file(content: bytes, config: Mapping[str, Any]) -> RankFile | None:
    """Return the ranks in a tiktoken file with the configuration next to it; None if it isn't such a file.

    Raises ValueError if its way to cut text isn't known.
    """
    ranks = tiktoken_ranks(content)
    if ranks is None:
        return None
    digest, named = hashlib.sha256(content).hexdigest(), set(_names(config))
    known = [each for each in FAMILIES.values() if each.digest == digest or named.intersection(each.signs)]
    pattern = config.get("pat_str")
    # A folder may be one of two families by its names; guessing would give other ids without an error.
    if pattern is None and len(known) != 1:
        raise ValueError(
            f"holds {len(ranks):,} tiktoken ranks of no known family ({', '.join(FAMILIES)}); set pat_str, the expression by which "
            "its model cuts text, and added_tokens_decoder, its control tokens, in a tokenizer_config.json next to it"
        )
    family = known[0] if len(known) == 1 else Family("", lambda _: (), None, "", None, ())
    first = 1 + max(ranks.values())
    numbered = {first + place: name for place, name in enumerate(family.special(first))}
    numbered |= {int(number): _content(token) for number, token in (config.get("added_tokens_decoder") or {}).items()}
    special = {name: number for number, name in numbered.items() if number >= first}
    for key in ("bos_token", "eos_token"):
        if config.get(key) and _content(config[key]) not in special:
            raise ValueError(
                f"doesn't have a control token {_content(config[key])!r}, its {key}; add it to added_tokens_decoder"
            )
    bos = special.get(_content(config.get("bos_token") or family.bos or ""))
    eos = special.get(_content(config.get("eos_token") or family.eos or ""))
    return RankFile(content, ranks, pattern or family.pattern, special, bos, eos, nfc=family.nfc)


def tiktoken_ranks(content: bytes) -> dict[bytes, int] | None:
    """Return the ranks in a file with a token in base64 and a number on each line, else None."""
    try:
        pairs = (line.split() for line in content.splitlines() if line)
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs} or None
    except (ValueError, binascii.Error):
        return None


def _names(value: Any) -> list[str]:  # noqa: ANN401 - JSON
    """The texts in a configuration, at any depth."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [name for each in value for name in _names(each)]
    return [value] if isinstance(value, str) else []


def _content(token: Any) -> str:  # noqa: ANN401 - JSON
    return token["content"] if isinstance(token, dict) else token


def tekken_file(content: bytes, tekken: Mapping[str, Any]) -> RankFile:
    """Return the ranks of a parsed tekken.json. Raises KeyError, TypeError or ValueError for one that has not all that it needs."""
    config = tekken["config"]
    count, size = config["default_num_special_tokens"], config["default_vocab_size"]
    listed = tekken.get("special_tokens")
    named = {name: number for number, name in enumerate(TEKKEN_CONTROLS)}
    if listed is not None:
        named = {each["token_str"]: each["rank"] for each in listed}
    # The ids up to the first token's are control strings, named or not. Ranks beyond the size of the vocabulary aren't used.
    special = named | {f"<SPECIAL_{number}>": number for number in range(len(named), count)}
    ranks = {base64.b64decode(token["token_bytes"]): count + token["rank"] for token in tekken["vocab"][: size - count]}
    return RankFile(content, ranks, config["pattern"], special, special.get("<s>"), special.get("</s>"), matched=False)
