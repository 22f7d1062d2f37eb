"""Where transformers' `AutoTokenizer` gives other ids than a preparation: trainers and vLLM load a tokenizer by it.

transformers 5 makes some tokenizers anew instead of reading their tokenizer.json, with other splitting, prefixes or added tokens. So a
fixed set of telling texts, with the tokenizer's own control tokens, is encoded both ways.
"""

import contextlib
import io
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import tiktoken.registry
from tokenmill.tasks.tokenize.gate import NASTY
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource
from tokenmill.tasks.tokenize.vocabulary import Vocabulary

CONTROLS_TRIED = 20
SHOWN = 3  # texts that are shown of those that differ


@dataclass(frozen=True, slots=True)
class AutoTokenizerCheck:
    """What `AutoTokenizer` makes of a tokenizer: how many texts were tried, how it differs, and why it wasn't compared."""

    texts: int
    differences: Sequence[str]
    not_compared: str | None = None

    @property
    def line(self) -> str:
        if self.not_compared:
            return f"not compared: {self.not_compared}"
        if not self.differences:
            return f"AutoTokenizer gives the same ids for {self.texts} telling texts"
        return "; ".join(self.differences)


def check_autotokenizer(model: str) -> AutoTokenizerCheck:
    """Compare a tokenizer with what `AutoTokenizer` makes of it. Raises InputError for one that can't be found."""
    vocabulary = find_vocabulary(TokenizerSource(model=model))
    path = Path(model).expanduser()
    place = str(path.parent if path.is_file() else path if path.is_dir() else model)
    if model in tiktoken.registry.list_encoding_names():
        return AutoTokenizerCheck(0, [], f"{model} is an encoding of tiktoken's, which AutoTokenizer doesn't load")
    try:
        from transformers import AutoTokenizer  # takes seconds, and is an extra

        logging.getLogger("transformers").setLevel(logging.ERROR)
        with contextlib.redirect_stderr(io.StringIO()):
            auto = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except ImportError:
        return AutoTokenizerCheck(0, [], "transformers isn't installed: pip install 'transformers>=4.57'")
    # transformers raises any of these
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        return AutoTokenizerCheck(0, [f"AutoTokenizer can't load {place}: {reason}"])
    texts = telling_texts(vocabulary, auto.get_added_vocab())
    names = (("EOS", vocabulary.eos, auto.eos_token_id), ("BOS", vocabulary.bos, auto.bos_token_id))
    found = [f"{name} is {own}, AutoTokenizer's {other}" for name, own, other in names if own != other]
    # All texts in one call: the reference encodes them as an array
    encoded = vocabulary.reference(False).encode(pa.array(texts, pa.large_string()))
    own = [ids.tolist() for ids in np.split(encoded.ids, encoded.offsets[1:-1])]
    others = [auto.encode(text, add_special_tokens=False) for text in texts]
    wrong = [(text, one, other) for text, one, other in zip(texts, own, others, strict=True) if one != other]
    if wrong:
        shown = [f"{text[:40]!r} gives {one[:8]}, AutoTokenizer {other[:8]}" for text, one, other in wrong[:SHOWN]]
        found += [f"{len(wrong)} of {len(texts)} texts get other ids", *shown]
    return AutoTokenizerCheck(len(texts), found)


def telling_texts(vocabulary: Vocabulary, added: Mapping[str, int]) -> list[str]:
    """Texts on which tokenizers differ, and control tokens beside words and blanks, first those that one side lacks.

    `added` maps the added tokens of `AutoTokenizer` to ids: it also adds those that only tokenizer_config.json lists.
    """
    own = vocabulary.controls
    controls = dict.fromkeys([*(name for name in [*own, *added] if own.get(name) != added.get(name)), *own])
    tried = itertools.islice(controls, CONTROLS_TRIED)
    return [text for text in NASTY if text] + [f"a {control} b{control}" for control in tried]
