"""Normal form, held against Python's own Unicode."""

import unicodedata

from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.dedup.shingles import normalized, normalized_words

from tests.dedup.deduplication import large

CODE_POINTS = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]

TROUBLE = st.sampled_from(
    [" ", "\n", "\t", "\u00a0", "\u3000", "\u2028", "\x1c", "e\u0301", "\u0301", "\ufb01", "\u200b", "й", "\u2019", "中", "😀", "\u0627", "\u0653", "\u304b", "\u3099"]
)  # fmt: skip


def by_python(text):
    return " ".join(unicodedata.normalize("NFC", text).split())


def test_every_code_point_is_treated_as_python_treats_it():
    assigned = [each for each in CODE_POINTS if unicodedata.category(each) != "Cn"]
    texts = [f"a{each}b {each}" for each in assigned]
    differing = [
        text
        for text, found in zip(texts, normalized(large(texts)).to_pylist(), strict=True)
        if found != by_python(text)
    ]
    assert differing == []


@given(texts=st.lists(st.lists(TROUBLE | st.text(max_size=3)).map("".join)))
def test_normal_form_is_nfc_with_single_blanks(texts):
    assigned = [text for text in texts if all(unicodedata.category(each) != "Cn" for each in text)]
    assert normalized(large(assigned)).to_pylist() == [by_python(text) for text in assigned]


@given(texts=st.lists(st.text()))
def test_normal_form_is_stable(texts):
    once = normalized(large(texts))
    assert normalized(once).equals(once)
    assert normalized_words(normalized_words(once)).equals(normalized_words(once))


def test_a_slice_of_texts_is_normalized_as_the_whole_is():
    texts = large(["a  b", None, " c\td ", "", "\n"])
    assert normalized(texts).to_pylist() == ["a b", "", "c d", "", ""]
    assert normalized(texts.slice(1, 3)).to_pylist() == ["", "c d", ""]


def test_case_and_punctuation_are_kept_except_in_bare_words():
    texts = large(["The mill's wheel, (re)built in 1802:\nÉté!", "Cafe\u0301 - 北京。 \u0915\u093f"])
    assert normalized(texts).to_pylist() == ["The mill's wheel, (re)built in 1802: Été!", "Café - 北京。 \u0915\u093f"]
    assert normalized_words(texts).to_pylist() == ["the mill s wheel re built in 1802 été", "café 北京 \u0915\u093f"]
