"""Personal data and secrets in text: e-mail addresses, IPv4 addresses, private keys and access tokens.

The address patterns are from datatrove's PIIFormatter (its authors took the first from the RFC 5322 regular expression).
Arrow finds the few texts that may hold any; only these become Python strings. An e-mail address is searched from its `@`, so
that time is linear: the bare pattern takes hours for a megabyte of `a-a-a-`. Keys are recognized by the prefixes that their
issuers document, so passwords and other secrets without a prefix are not found.
"""

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyarrow import compute

from .settings import PersonalData, Treatment

Span = tuple[int, int]

LOCAL = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789!#$%&'*+/=?^_`{|}~-"
"""The characters before the @ of an e-mail address, besides dots."""

LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
OCTET = r"(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"
DOMAIN = re.compile(rf"@(?:(?:{LABEL}\.)+{LABEL}|\[(?:{OCTET}\.){{3}}(?:{OCTET}|[A-Za-z0-9-]*[A-Za-z0-9]:)])")
BEGIN = re.compile(rf"\b[{re.escape(LOCAL)}]")
IP = re.compile(rf"(?:{OCTET}\.){{3}}{OCTET}")

KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----(?:(?!-----)[\s\S])*(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----)?"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"  # Amazon Web Services
    r"|\b(?:gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9_]{82})\b"  # GitHub
    r"|\bglpat-[A-Za-z0-9_-]{20,64}"  # GitLab
    r"|\bxox[abprs]-[A-Za-z0-9-]{10,255}"  # Slack
    r"|\bAIza[0-9A-Za-z_-]{35}"  # Google
    r"|\b[rs]k_live_[0-9A-Za-z]{24,255}"  # Stripe
    r"|\bhf_[A-Za-z]{34}\b"  # Hugging Face
    r"|\bsk-(?:ant-|proj-)?[A-Za-z0-9_-]{32,255}"  # OpenAI, Anthropic
    r"|\beyJ[A-Za-z0-9_-]{10,4096}\.eyJ[A-Za-z0-9_-]{10,4096}\.[A-Za-z0-9_-]{10,4096}"  # JSON Web Tokens
)


def emails(text: str) -> Iterator[Span]:
    """Where e-mail addresses are."""
    done = 0
    for domain in DOMAIN.finditer(text):
        at = domain.start()
        before = text[done:at]  # addresses don't overlap
        local = before[len(before.rstrip(LOCAL + ".")) :].rpartition("..")[2].lstrip(".")
        begin = None if local.endswith(".") else BEGIN.search(text, at - len(local), at)
        if begin:
            yield begin.start(), domain.end()
            done = domain.end()


def ips(text: str) -> Iterator[Span]:
    """Where IPv4 addresses are."""
    # An octet with a leading zero is part of a version or a date.
    matches = (found for found in IP.finditer(text) if not re.search(r"(?:^|\.)0[0-9]", found[0]))
    return (found.span() for found in matches)


def public_ips(text: str) -> Iterator[Span]:
    """Where public IPv4 addresses are."""
    return ((start, end) for start, end in ips(text) if ipaddress.ip_address(text[start:end]).is_global)


def secrets(text: str) -> Iterator[Span]:
    """Where private keys and access tokens are."""
    return (found.span() for found in KEY.finditer(text))


@dataclass(frozen=True, slots=True)
class _Kind:
    """A data type: its name, the pattern (RE2) of texts that may contain it, how to find it, its treatment and its mask."""

    name: str
    hint: str
    find: Callable[[str], Iterator[Span]]
    treatment: Treatment
    mask: str

    @property
    def reason(self) -> str:
        return f"personal_{self.name}"


def _kinds(settings: PersonalData) -> Sequence[_Kind]:
    find_ips = public_ips if settings.only_public_ips else ips
    tokens = "PRIVATE KEY|AKIA|ASIA|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AIza|k_live_|hf_|sk-|eyJ"
    return (
        _Kind("emails", "@", emails, settings.emails, settings.email_mask),
        _Kind("ips", r"[0-9]\.[0-9]+\.[0-9]+\.[0-9]", find_ips, settings.ips, settings.ip_mask),
        _Kind("secrets", tokens, secrets, settings.secrets, settings.secret_mask),
    )


@dataclass(frozen=True, slots=True)
class Treated:
    """Why n texts are dropped (a string [n], empty for kept ones), the texts with masks, and the number of texts by finding."""

    reasons: np.ndarray
    texts: pa.LargeStringArray
    found: Mapping[str, Mapping[str, int]]


def treat(texts: pa.LargeStringArray, settings: PersonalData) -> Treated:
    """Count, mask or drop texts with personal data. Masks of one kind are in place when the next is searched."""
    reasons = np.full(len(texts), "", object)
    found: dict[str, Mapping[str, int]] = {}
    for kind in _kinds(settings):
        if kind.treatment == "off":
            continue
        hint = compute.MatchSubstringOptions(kind.hint)
        likely = np.flatnonzero(compute.call_function("match_substring_regex", [texts], hint)).tolist()
        spans = {number: each for number in likely if (each := [*kind.find(texts[number].as_py())])}
        found[kind.name] = {"documents": len(spans), "found": sum(map(len, spans.values()))}
        if kind.treatment == "drop":  # for the first kind that is found
            numbers = np.array([number for number in spans if not reasons[number]], np.int64)
            reasons[numbers] = kind.reason
        if kind.treatment == "mask" and spans:
            masked: list[str] = []
            for number, each in spans.items():
                text = texts[number].as_py()
                ends, starts = [0, *(end for _, end in each)], [*(start for start, _ in each), len(text)]
                masked.append(kind.mask.join(text[end:start] for end, start in zip(ends, starts, strict=True)))
            changed = np.zeros(len(texts), np.bool_)
            changed[list(spans)] = True
            replaced = [texts, pa.array(changed), pa.array(masked, pa.large_string())]
            texts = compute.call_function("replace_with_mask", replaced)
    return Treated(reasons, texts, found)


def total(counts: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """Return the sums of several counts of findings."""
    sums: dict[str, Counter[str]] = {}
    for each in counts:
        for name, found in each.items():
            sums.setdefault(name, Counter()).update(found)
    return {name: {"documents": found["documents"], "found": found["found"]} for name, found in sums.items()}
