/* The counts that rules compare, what the rules know, and the memory that texts reuse. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Classes of characters, a bit each, in the order of `CLASSES` in kernel.py. */
enum {
    SPACE = 1 << 0, LINE_BREAK = 1 << 1, ALPHA = 1 << 2, LOWER = 1 << 3, UPPER = 1 << 4, QUOTE = 1 << 5, PREFIX = 1 << 6,
    SUFFIX = 1 << 7, ICON = 1 << 8, BEFORE_DOT = 1 << 9, HOST = 1 << 10, SCHEME = 1 << 11, DIGIT = 1 << 12, LETTER = 1 << 13,
    SYMBOL = 1 << 14, PUNCTUATION = 1 << 15, SENTENCE_END = 1 << 16, LINE_END = 1 << 17
};

/* The counts of a text, in the order of `COUNTS` in kernel.py; those of runs of words follow. */
enum {
    CHARACTERS, WORDS, PLAIN_WORDS, PLAIN_CHARACTERS, HASHES, ELLIPSES, LINES, BULLET_LINES, ELLIPSIS_LINES, ALPHABETIC_WORDS,
    STOP_WORDS, PARAGRAPHS, REPEATED_PARAGRAPHS, REPEATED_PARAGRAPH_CHARACTERS, BLOCKS, REPEATED_BLOCKS, REPEATED_BLOCK_CHARACTERS,
    NEW_LINES, FILLED_LINES, ENDED_LINES, SHORT_LINES, REPEATED_LINE_CHARACTERS, SENTENCES, LOREM_IPSUM, CURLY_BRACKET,
    LONG_WORD_LINES, UNENDED_LINES, FEW_WORD_LINES, JAVASCRIPT_LINES, POLICY_LINES, FIXED_COUNTS
};

/* Which counts are wanted. */
enum { QUALITY = 1, REPETITION = 2, CLEAN_LINES = 4, FINEWEB = 8 };

/* What the rules of lines compare, in the order of `kernel.py`. */
enum { SHORT_LINE, LONGEST_WORD, LEAST_WORDS, CITATIONS, TERMINAL, LOREM, JAVASCRIPT, CURLY, POLICY };

enum { HEADS = 1 << 12 };

static const uint64_t PRIME = ((uint64_t)1 << 61) - 1, BASE = 0x0F1E2D3C4B5A6978u;

typedef uint32_t code;

struct span { uint32_t start, end; uint64_t hash; };
struct spans { struct span *at; int64_t count, room; };

/* Distinct strings: string i is [bounds[i], bounds[i + 1]) of `chars`. `slots` holds i + 1, by hash. */
struct strings { const code *chars; const int64_t *bounds; int64_t count; uint32_t *slots; uint64_t mask; };

/* The first words of special cases that the rules would cut otherwise, and where they occur among the others. */
struct pattern { int64_t special, first, count, next; }; /* `next` has the same number in `heads` */

struct rules {
    const uint32_t *classes;
    struct strings specials, units, stop_words, phrases;
    const int64_t *pieces, *piece_bounds; /* the lengths of the words of special case i: [piece_bounds[i], piece_bounds[i + 1]) */
    struct pattern *patterns;
    int64_t pattern_count, longest_unit;
    struct spans pattern_words;
    int64_t heads[HEADS]; /* the first pattern, plus 1, by the hash of its first word */
    int failed;
};

/* Memory that texts reuse. */
struct scratch {
    code *chars, *line, *joined;
    int64_t room;
    struct spans words, line_words, other, pieces;
    uint32_t *slots, *ids, *grams, *numbers, distinct;
    uint64_t *powers, *prefix, *hashes;
    int64_t slot_room, word_room, powers_ready;
    int64_t *seen;
};

static inline uint64_t mixed(uint64_t sum) {
    sum = (sum ^ sum >> 32) * 0xD6E8FEB86659FD93u;
    return sum ^ sum >> 32;
}

static inline uint64_t hash_of(const code *chars, int64_t start, int64_t end) {
    uint64_t sum = 0x9E3779B97F4A7C15u ^ (uint64_t)(end - start);
    for (int64_t i = start; i < end; i++)
        sum = (sum ^ chars[i]) * 0x9FB21C651E98DF25u, sum ^= sum >> 29;
    return mixed(sum);
}

static inline int same(const code *one, const code *other, int64_t count) {
    return memcmp(one, other, (size_t)count * sizeof *one) == 0;
}

static inline int ascii_digit(code c) {
    return c - '0' < 10u;
}

/* ---- sets of strings ---- */

static uint64_t slots_for(int64_t count) {
    uint64_t slots = 16;
    while (slots < 2 * (uint64_t)count)
        slots *= 2;
    return slots;
}

static int64_t find_string(const struct strings *set, const code *chars, const struct span *word) {
    for (uint64_t at = word->hash;; at++) {
        const uint32_t found = set->slots[at & set->mask];
        if (!found)
            return -1;
        const int64_t start = set->bounds[found - 1], length = set->bounds[found] - start;
        if (length == word->end - word->start && same(set->chars + start, chars + word->start, length))
            return found - 1;
    }
}

static int fill_strings(struct strings *set) {
    const uint64_t slots = slots_for(set->count);
    set->mask = slots - 1;
    set->slots = calloc(slots, sizeof *set->slots);
    if (!set->slots)
        return 0;
    for (int64_t i = 0; i < set->count; i++) {
        uint64_t at = hash_of(set->chars, set->bounds[i], set->bounds[i + 1]);
        while (set->slots[at & set->mask])
            at++;
        set->slots[at & set->mask] = (uint32_t)i + 1;
    }
    return 1;
}
