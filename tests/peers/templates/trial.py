"""One template against all conversations: what came of each."""

import itertools
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenmill.tasks.chat.check import checked_renderer, text_encoder
from tokenmill.tasks.chat.conversation import Rejected, apart
from tokenmill.tasks.chat.encoding import Batch
from tokenmill.tasks.chat.loss import LossPolicy
from tokenmill.tasks.chat.parse import conversation
from tokenmill.tasks.chat.sequences import Renderer
from tokenmill.tasks.chat.template import ChatTemplate
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.tokenize.vocabulary import Definition, Vocabulary, huggingface_fingerprint, huggingface_vocabulary

from tests.peers.templates.oracle import TODAY, TOKEN, Judge, Reference, with_text_arguments, words_of
from tests.peers.templates.packages import Template
from tests.peers.templates.talks import FOREIGN, Record

Turn = tuple[int, int]
"""The first message of a turn, and the one behind its last."""

TAGS = re.compile(r"\{%-?\s*generation\s*-?%\}")
BEGINS, ENDS = "<s>", "</s>"
FAMILIES = {
    "\uff5c": ("<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"),
    "<|eot_id|>": ("<|begin_of_text|>", "<|eot_id|>"),
    "<start_of_turn>": ("<bos>", "<eos>"),
    "<|turn>": ("<bos>", "<eos>"),
    "<|im_end|>": ("<|endoftext|>", "<|im_end|>"),
    "<|end_of_text|>": ("<|end_of_text|>", "<|end_of_text|>"),
    "<|endoftext|>": ("<|endoftext|>", "<|endoftext|>"),
}
"""What a family's tokenizer calls BOS and EOS, by a token that its templates hold."""


def base(texts: list[str]) -> dict[str, Any]:
    """A small byte-level tokenizer.json, with merges learned from some texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False)
    )
    return json.loads(tokenizer.to_str())


@dataclass
class Outcome:
    """What came of a template: accepted or not, why, and of its conversations how many came out how."""

    accepted: bool = False
    reason: str = ""
    is_chat: bool = True
    ends: bool = True
    equal: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    refused: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    loose: dict[str, str] = field(default_factory=dict)
    stops: set[str] = field(default_factory=set)
    open: dict[str, str] = field(default_factory=dict)
    untrue: str = ""

    @property
    def unended(self) -> dict[str, str]:
        """The sequences with a turn whose end is not trained on, and the token behind it; without those of a token that ends
        turns only within a history, which models do not write.
        """
        return {name: token for name, token in self.open.items() if token in self.stops or not token}


class Trial:
    """A template with a vocabulary that has its control tokens."""

    def __init__(self, template: Template, definition: dict[str, Any], talks: dict[str, Record]) -> None:
        source = template.source
        bos, eos = next((pair for mark, pair in FAMILIES.items() if mark in source), (BEGINS, ENDS))
        self.reference = Reference(source, {"bos_token": bos, "eos_token": eos})
        self.talks, self.source = talks, source
        texts = [self.theirs(talk["messages"], talk.get("tools"))[0] or "" for talk in talks.values()]
        self.is_chat = any(
            all(word in text for word in words_of(talk["messages"][0]) + words_of(talk["messages"][1]))
            for text, talk in zip(texts, talks.values(), strict=True)
            if len(talk["messages"]) > 1 and text
        )
        found = {match for text in [source, *texts] for match in TOKEN.findall(text)} - {""}
        tokens = sorted(found | {bos, eos})
        size = len(definition["model"]["vocab"])
        added = [
            {"id": size + place, "content": token, "special": True, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False}
            for place, token in enumerate(tokens)
        ]  # fmt: skip
        whole = {**definition, "added_tokens": added}
        definition, config = Definition.of(orjson.dumps(whole)), {"bos_token": bos, "eos_token": eos}
        self.vocabulary: Vocabulary = huggingface_vocabulary(
            definition, config, definition.facts(config), huggingface_fingerprint(definition)
        )
        self.tokenizer = Tokenizer.from_str(json.dumps(whole))
        self.pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
        self.variables: dict[str, Any] = {"bos_token": bos, "eos_token": eos}
        if "strftime_now" in source:
            self.variables["date"] = TODAY.isoformat()

    def theirs(self, messages: list[Record], tools: Any, stop: int | None = None) -> list[str | None]:
        """Transformers' renderings, with arguments as objects and as JSON text."""
        kept = messages[:stop]
        texts = [with_text_arguments(message, lambda value: json.dumps(value, ensure_ascii=False)) for message in kept]
        return [self.reference.render(kept, tools), self.reference.render(texts, tools)]

    def run(self, store: str) -> Outcome:
        """Try everything."""
        outcome = Outcome(is_chat=self.is_chat, ends=self.ends)
        try:
            checked = checked_renderer(
                ChatTemplate(self.source, self.variables), self.vocabulary, LossPolicy(), "auto", "literal", store
            )
        except InputError as error:
            outcome.reason = str(error)
            outcome.untrue = "" if self.is_true(outcome.reason) else outcome.reason
            return outcome
        outcome.accepted = True
        judge = Judge(self.reference, self.pattern, open_ended=self._open_ended())
        for name, talk in self.talks.items():
            self._try(name, talk, checked.renderer, judge, outcome)
        return outcome

    def is_true(self, reason: str) -> bool:
        """Whether transformers' renderings of one turn bear a refusal out."""
        talk = self.talks["one turn"]["messages"]
        asked = words_of(talk[0])[0]
        text, prompted = self.reference.render(talk, None), self.reference.render(talk[:1], None, prompt=True)
        if "(template_error)" in reason:
            return text is None or ".format(" in self.source
        if "(no_end_of_turn)" in reason:
            return not self._ended()
        if "(no_generation_prompt)" in reason:
            return text is not None and prompted is not None and not text.startswith(prompted) and asked in text
        if "(message_outside)" in reason:
            return "messages[:-1]" in self.source or "range(start_idx" in self.source
        return False

    @property
    def ends(self) -> bool:
        """Whether anything in a text shows where an answer ends."""
        return self._ended() or self._open_ended()

    def _ended(self) -> bool:
        """Whether a token, or other text than the next header, stands behind the answer of one turn, if it is written."""
        talk = self.talks["one turn"]["messages"]
        text = self.reference.render(talk, None)
        prompted = self.reference.render(talk[:1], None, prompt=True) or ""
        if not text or talk[1]["content"] not in text:
            return True
        behind = text.partition(talk[1]["content"])[2].strip()
        return self.pattern.search(behind) is not None or not prompted.strip().endswith(behind)

    def _open_ended(self) -> bool:
        """Whether nothing follows the answer of one turn, and a token follows it where another turn comes."""
        one, two = self.talks["one turn"]["messages"], self.talks["two turns"]["messages"]
        alone, followed = self.theirs(one, None)[0] or "", self.theirs(two, None)[0] or ""
        behind = followed.partition(two[1]["content"])[2]
        return alone.endswith(one[1]["content"]) and self.pattern.match(behind) is not None

    def _try(self, name: str, talk: Record, renderer: Renderer, judge: Judge, outcome: Outcome) -> None:
        given = conversation(talk, "messages", "tools")
        given = given if isinstance(given, Rejected) else apart(given, renderer.inline)
        if isinstance(given, Rejected):
            outcome.counts["unread"] += 1
            return
        sequences = renderer.sequences(given)
        if isinstance(sequences, Rejected):
            outcome.counts["refused"] += 1
            outcome.refused[name] = f"{sequences.reason}: {sequences.detail}"
            return
        outcome.counts["taken"] += 1
        names = {number: token for token, number in renderer.controls.ids.items()}
        turns = answered(talk["messages"])
        batch = Batch()
        for pieces in sequences:
            batch.add(pieces)
        encoded = batch.encode(text_encoder(self.vocabulary, renderer.controls, "reference", "literal"))
        for place, pieces in enumerate(sequences):
            texts = [names[piece.token] if piece.text is None else piece.text for piece in pieces]
            text = "".join(texts)
            flags = np.concatenate([flags_of(piece, each) for piece, each in zip(pieces, texts, strict=True)])
            span = turns[place] if len(sequences) > 1 or len(turns) == 1 else (0, len(talk["messages"]))
            ours = encoded.ids[encoded.offsets[place] : encoded.offsets[place + 1]].tolist()
            self._judge(f"{name} [{place}]", talk, span, text, flags, ours, judge, outcome)

    def _judge(
        self,
        name: str,
        talk: Record,
        span: Turn,
        text: str,
        flags: np.ndarray,
        ours: list[int],
        judge: Judge,
        outcome: Outcome,
    ) -> None:
        """Judge one sequence, which is of the messages `span`."""
        messages = self._messages(talk, span[1], text)
        if messages is None:
            outcome.ids[name] = f"ours {text!r} theirs {self.theirs(talk['messages'], talk.get('tools'))[0]!r}"
            return
        wanted, starts, loose = self._wanted(text, messages, talk.get("tools"), span[0], judge)
        begins = starts if not loose else [start for start, _ in runs(flags)]
        if "markup" not in name and ours not in self._encodings(text, begins):
            outcome.ids[name] = f"ids of {text!r}, begun at {begins}"
        trained = [text[start:stop] for start, stop in runs(flags)]
        words = "|".join(word for each in messages if each["role"] == "assistant" for word in words_of(each)[-1:])
        for start, stop in runs(flags):
            tail, behind = text[start:stop].rstrip(), self.pattern.match(text, stop)
            outcome.stops |= {found for found in self.pattern.findall(tail)[-1:] if tail.endswith(found)}
            if words and re.search(rf"(?:{words})\W?$", tail):
                outcome.open[name] = behind.group() if behind else ""
        foreign = [word for each in trained for word in FOREIGN.findall(each)]
        own = [word for each in messages[span[0] :] if each["role"] == "assistant" for word in words_of(each)]
        missing = [word for word in own if word in text and not any(word in each for each in trained)]
        if foreign or missing:
            outcome.wrong[name] = f"foreign {foreign} missing {missing} trained {trained} of {text!r}"
        elif loose:
            outcome.counts["by words"] += 1
            outcome.loose[name] = f"{loose} trained {trained} of {text!r}"
        elif not np.array_equal(wanted, flags):
            outcome.wrong[name] = f"trained {trained} wanted {[text[a:b] for a, b in runs(wanted)]} of {text!r}"
        else:
            outcome.counts["right"] += 1

    def _messages(self, talk: Record, stop: int, text: str) -> list[Record] | None:
        """The first messages of a talk, with arguments as they are in `text`, which transformers makes of them; or None."""
        whole = talk["messages"]
        for number in [stop, *range(len(whole), 0, -1)]:
            given, spelled = self.theirs(whole, talk.get("tools"), number)
            if self._is_ended(text, given):
                return whole[:number]
            if self._is_ended(text, spelled):
                return [
                    with_text_arguments(each, lambda value: json.dumps(value, ensure_ascii=False))
                    for each in whole[:number]
                ]
        return None

    def _is_ended(self, text: str, theirs: str | None) -> bool:
        """Whether a text is transformers', or that and the header that ends its answer where nothing else does."""
        behind = text.removeprefix(theirs) if theirs and self._open_ended() else ""
        return text == theirs or (behind != text and self.pattern.fullmatch(behind) is not None)

    def _wanted(
        self, text: str, messages: list[Record], tools: Any, first: int, judge: Judge
    ) -> tuple[np.ndarray, list[int], list[str]]:
        """What is to be trained on of the messages from `first` on, where answers start, and those that nobody can judge."""
        wanted, starts, loose = np.zeros(len(text), bool), list[int](), list[str]()
        if TAGS.search(self.source):
            asked = messages[first]
            before = text.find(words_of(asked)[0]) if first and asked["role"] == "user" else -1
            ranges = self.reference.tagged(messages, tools)
            starts = [start for start, _ in ranges]
            for start, stop in ranges:
                wanted[start:stop] |= start > before
            return wanted, starts, loose
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or number < first:
                continue
            expected = judge.expected(text, messages, tools, number)
            if expected.start is None or expected.stop is None:
                loose.append(f"{number}: {expected}")
                continue
            wanted[expected.start : self._stop(text, messages, tools, number, expected.stop)] = True
            starts.append(expected.start)
        return wanted, starts, loose

    def _stop(self, text: str, messages: list[Record], tools: Any, number: int, stop: int) -> int:
        """Where training on an answer stops: before a token that never ends it where it is the last."""
        alone = self.reference.render(messages[: number + 1], tools) or ""
        words = [word for word in words_of(messages[number]) if word in alone]
        behind = alone[max(map(alone.rfind, words), default=0) :]
        token = next((each for each in self.pattern.findall(text[:stop])[-1:] if text[:stop].endswith(each)), "")
        stays = token in behind or "tool_calls" in messages[number] or self._open_ended()
        return stop if stays or not self.pattern.match(text, stop) else stop - len(token)

    def _encodings(self, text: str, starts: list[int]) -> list[list[int]]:
        """The tokenizer's ids of a text: as one, and with every answer encoded apart."""
        borders = sorted({0, *starts, len(text)})
        parts = [text[start:stop] for start, stop in itertools.pairwise(borders)]
        encoded = [self.tokenizer.encode(part, add_special_tokens=False).ids for part in [text, *parts]]
        return [encoded[0], [token for each in encoded[1:] for token in each]]


def answered(messages: list[Record]) -> list[tuple[int, int]]:
    """The user turns that hold an answer."""
    starts = [number for number, message in enumerate(messages) if message["role"] == "user"]
    starts = starts if starts[:1] == [0] else [0, *starts]
    turns = zip(starts, [*starts[1:], len(messages)], strict=True)
    return [turn for turn in turns if "assistant" in [message["role"] for message in messages[turn[0] : turn[1]]]]


def flags_of(segment: Any, text: str) -> np.ndarray:
    """Which characters of a segment are trained on."""
    return np.full(len(text), segment.trained, bool)


def runs(flags: np.ndarray) -> list[tuple[int, int]]:
    """Where runs of truth begin and end."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
