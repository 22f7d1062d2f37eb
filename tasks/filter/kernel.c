/*
The inner loops of quality rules, in plain C: split texts into words, and count what the rules compare.

`kernel.py` calls `measure` with ctypes, so Python's headers are not needed and other threads run meanwhile. The counts are those
of datatrove's filters. Words are those of spaCy's rules for English: chunks between white space lose prefixes and suffixes, and
are cut at infixes, unless they are special cases or addresses of the web. Equal words, lines and runs of words are compared
character by character; hashes only find candidates.

A text is decoded into code points first, because the rules count characters. Memory is about 25 bytes per byte of the longest text.
*/

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

/* ---- words ---- */

static inline void push(struct rules *rules, struct spans *found, const code *chars, int64_t start, int64_t end) {
    if (found->count == found->room) {
        const int64_t room = found->room ? 2 * found->room : 1024;
        struct span *at = realloc(found->at, (size_t)room * sizeof *at);
        if (!at) {
            rules->failed = 1;
            return;
        }
        found->at = at;
        found->room = room;
    }
    found->at[found->count++] = (struct span){(uint32_t)start, (uint32_t)end, hash_of(chars, start, end)};
}

static int64_t special_case(const struct rules *rules, const code *chars, int64_t start, int64_t end) {
    const struct span word = {(uint32_t)start, (uint32_t)end, hash_of(chars, start, end)};
    return find_string(&rules->specials, chars, &word);
}

static void push_special(struct rules *rules, struct spans *found, const code *chars, int64_t start, int64_t special) {
    for (int64_t i = rules->piece_bounds[special]; i < rules->piece_bounds[special + 1]; i++) {
        push(rules, found, chars, start, start + rules->pieces[i]);
        start += rules->pieces[i];
    }
}

/* The length of the prefix to cut from a chunk, or 0. */
static int64_t prefix_of(const struct rules *rules, const code *chars, int64_t start, int64_t end) {
    const code *at = chars + start;
    if (rules->classes[*at] & PREFIX)
        return 1;
    if (*at == '+')
        return !(start + 1 < end && ascii_digit(at[1]));
    if (*at == '.') {
        int64_t dots = 1;
        while (start + dots < end && at[dots] == '.')
            dots++;
        return dots > 1 ? dots : 0;
    }
    if ((*at == 'C' || *at == 'A') && start + 1 < end && at[1] == '$')
        return 2;
    return *at == 'U' && start + 2 < end && at[1] == 'S' && at[2] == '$' ? 3 : 0;
}

/* The length of a unit or currency behind a digit at the end of a chunk, or 0. */
static int64_t unit_of(const struct rules *rules, const code *chars, int64_t start, int64_t end) {
    for (int64_t length = 0; length <= rules->longest_unit && end - length > start; length++)
        if (ascii_digit(chars[end - length - 1])) {
            const struct span unit = {(uint32_t)(end - length), (uint32_t)end, hash_of(chars, end - length, end)};
            return length && find_string(&rules->units, chars, &unit) >= 0 ? length : 0;
        }
    return 0;
}

static int64_t dot_suffix(const struct rules *rules, const code *chars, int64_t start, int64_t end) {
    int64_t dots = 1;
    while (end - dots > start && chars[end - dots - 1] == '.')
        dots++;
    if (dots > 1)
        return dots;
    if (end - start < 2)
        return 0;
    const code before = chars[end - 2];
    if (rules->classes[before] & BEFORE_DOT)
        return 1;
    if (end - start < 3)
        return 0;
    const code first = chars[end - 3];
    if (first == 0xB0 && before < 128 && strchr("FfCcKk", (int)before) && before)
        return 1;
    return (rules->classes[before] & UPPER) && (rules->classes[first] & UPPER);
}

/* The length of the suffix to cut from a chunk, or 0: the longest one. */
static int64_t suffix_of(const struct rules *rules, const code *chars, int64_t start, int64_t end) {
    if (start == end)
        return 0;
    const code last = chars[end - 1], before = end - start > 1 ? chars[end - 2] : 0;
    if (last == '.')
        return dot_suffix(rules, chars, start, end);
    if (last == 0x2026 && before == 0x2026)
        return 2;
    if ((last == 's' || last == 'S') && (before == '\'' || before == 0x2019))
        return 2;
    if (last == '+')
        return ascii_digit(before);
    const int64_t unit = unit_of(rules, chars, start, end);
    return unit ? unit : (rules->classes[last] & SUFFIX) != 0;
}

static int64_t hyphen_at(const struct rules *rules, const code *chars, int64_t end, int64_t i) {
    static const int64_t longest = 3;
    const code c = chars[i];
    if (c != '-' && c != 0x2013 && c != 0x2014 && c != '~')
        return 0;
    const int64_t most = c == '-' ? longest : c == 0x2014 ? 2 : 1;
    for (int64_t length = 1; length <= most && i + length < end; length++) {
        if (rules->classes[chars[i + length]] & ALPHA)
            return length;
        if (chars[i + length] != c)
            return 0;
    }
    return 0;
}

/* The length of the infix at `i`, or 0. */
static int64_t infix_at(const struct rules *rules, const code *chars, int64_t start, int64_t end, int64_t i) {
    const code c = chars[i];
    const uint32_t kind = rules->classes[c];
    if (kind & ICON)
        return 1;
    if (c > '~' ? c != 0x2013 && c != 0x2014 : !memchr("+-*^.,~:<>=/", (int)c, 12))
        return 0;
    const uint32_t before = i > start ? rules->classes[chars[i - 1]] : 0, after = i + 1 < end ? rules->classes[chars[i + 1]] : 0;
    const int behind_digit = i > start && ascii_digit(chars[i - 1]);
    if (c == '.') {
        int64_t dots = 1;
        while (i + dots < end && chars[i + dots] == '.')
            dots++;
        return dots > 1 ? dots : (before & (LOWER | QUOTE)) && (after & (UPPER | QUOTE));
    }
    if (c == ',')
        return (before & ALPHA) && (after & ALPHA);
    if (!(before & ALPHA) && !behind_digit)
        return 0;
    if (c == ':' || c == '<' || c == '>' || c == '=' || c == '/')
        return (after & ALPHA) != 0;
    if (behind_digit && i + 1 < end && (c == '+' || c == '-' || c == '*' || c == '^'))
        if (ascii_digit(chars[i + 1]) || chars[i + 1] == '-')
            return 1;
    return hyphen_at(rules, chars, end, i);
}

/* ---- addresses of the web, which stay whole ---- */

/* What may follow a host: a port of two to five digits, then nothing or a path. */
static int ends_address(const struct rules *rules, const code *chars, int64_t at, int64_t end) {
    if (at < end && chars[at] == ':') {
        int64_t digits = 0;
        while (at + 1 + digits < end && rules->classes[chars[at + 1 + digits]] & DIGIT)
            digits++;
        if (digits < 2 || digits > 5)
            return 0;
        at += 1 + digits;
    }
    return at == end || chars[at] == '/' || chars[at] == '?' || chars[at] == '#';
}

static int is_host(const struct rules *rules, const code *chars, int64_t at, int64_t end) {
    for (;;) {
        const int64_t start = at;
        while (at < end && (rules->classes[chars[at]] & HOST || chars[at] == '_' || chars[at] == '-'))
            at++;
        if (at == start || at == end || chars[at] != '.' || at - start > 64)
            return 0;
        if (!(rules->classes[chars[start]] & HOST) || !(rules->classes[chars[at - 1]] & HOST))
            return 0;
        const int64_t top = ++at;
        int64_t stop = top;
        while (stop < end && rules->classes[chars[stop]] & LOWER)
            stop++;
        if (stop - top >= 2 && stop - top <= 63 && ends_address(rules, chars, stop, end))
            return 1;
    }
}

/* Whether an octet of an address, all digits, is one that may stand in this place: 0 first, 1 and 2 in the middle, 3 last. */
static int is_octet(const code *at, int64_t length, int place) {
    const int first = place == 0, last = place == 3;
    if (length == 1 || length == 2)
        return (!first && !last) || at[0] - '1' < 9u;
    if (length != 3)
        return 0;
    if (at[0] == '1')
        return 1;
    if (at[0] != '2')
        return 0;
    if (first)
        return at[1] == '0' || at[1] == '1' || (at[1] == '2' && at[2] - '0' < 4u);
    return at[1] - '0' < 5u || (at[1] == '5' && at[2] - '0' < (last ? 5u : 6u));
}

static int is_text(const code *at, int64_t length, const char *text) {
    for (int64_t i = 0; i < length; i++)
        if (!text[i] || at[i] != (code)text[i])
            return 0;
    return !text[length];
}

/* Whether two octets begin a private network; such addresses are cut. */
static int is_private(const code *chars, const int64_t *starts, const int64_t *lengths) {
    const code *one = chars + starts[0], *two = chars + starts[1];
    if (is_text(one, lengths[0], "10") || is_text(one, lengths[0], "127"))
        return 1;
    if (is_text(one, lengths[0], "169"))
        return is_text(two, lengths[1], "254");
    if (is_text(one, lengths[0], "192"))
        return is_text(two, lengths[1], "168");
    if (!is_text(one, lengths[0], "172") || lengths[1] != 2)
        return 0;
    return (two[0] == '1' && two[1] - '6' < 4u) || two[0] == '2' || (two[0] == '3' && two[1] - '0' < 2u);
}

static int is_internet_address(const struct rules *rules, const code *chars, int64_t at, int64_t end) {
    int64_t starts[4], lengths[4];
    for (int place = 0; place < 4; place++) {
        starts[place] = at;
        while (at < end && rules->classes[chars[at]] & DIGIT)
            at++;
        lengths[place] = at - starts[place];
        if (!is_octet(chars + starts[place], lengths[place], place))
            return 0;
        if (place < 3 && (at == end || chars[at++] != '.'))
            return 0;
    }
    return !is_private(chars, starts, lengths) && ends_address(rules, chars, at, end);
}

static int is_address_from(const struct rules *rules, const code *chars, int64_t start, int64_t end) {
    if (is_internet_address(rules, chars, start, end) || is_host(rules, chars, start, end))
        return 1;
    for (int64_t i = start + 1; i + 1 < end; i++)
        if (chars[i] == '@' &&
            (is_internet_address(rules, chars, i + 1, end) || is_host(rules, chars, i + 1, end)))
            return 1;
    return 0;
}

static int is_address(const struct rules *rules, const code *chars, int64_t start, int64_t end) {
    int64_t dots = 0, scheme = start;
    for (int64_t i = start; i < end && !dots; i++)
        dots += chars[i] == '.';
    if (!dots)
        return 0;
    if (is_address_from(rules, chars, start, end))
        return 1;
    while (scheme < end && rules->classes[chars[scheme]] & SCHEME)
        scheme++;
    if (scheme - start < 2 || scheme + 3 > end || chars[scheme] != ':' || chars[scheme + 1] != '/' || chars[scheme + 2] != '/')
        return 0;
    return is_address_from(rules, chars, scheme + 3, end);
}

/* ---- chunks and texts ---- */

/* Cut what is left of a chunk without prefixes and suffixes. */
static void cut_infixes(struct rules *rules, struct spans *found, const code *chars, int64_t start, int64_t end) {
    if (is_address(rules, chars, start, end)) {
        push(rules, found, chars, start, end);
        return;
    }
    int64_t from = start;
    for (int64_t i = start; i < end;) {
        const int64_t length = infix_at(rules, chars, start, end, i);
        if (length && i > start) {
            if (from < i)
                push(rules, found, chars, from, i);
            push(rules, found, chars, i, i + length);
            from = i + length;
        }
        i += length ? length : 1;
    }
    if (from < end)
        push(rules, found, chars, from, end);
}

/* The words of a chunk. `specials` says whether special cases count. `ends` is memory for suffixes. */
static void cut_chunk(struct rules *rules, struct spans *found, struct spans *ends, const code *chars, int64_t start, int64_t end,
                      int specials) {
    int64_t special = -1, size = -1;
    ends->count = 0;
    while (start < end && end - start != size) {
        if (specials && (special = special_case(rules, chars, start, end)) >= 0)
            break;
        size = end - start;
        const int64_t prefix = prefix_of(rules, chars, start, end);
        if (prefix && specials && prefix < size && (special = special_case(rules, chars, start + prefix, end)) >= 0) {
            push(rules, found, chars, start, start + prefix);
            start += prefix;
            break;
        }
        const int64_t suffix = suffix_of(rules, chars, start + prefix, end);
        if (suffix && specials && suffix < size && (special = special_case(rules, chars, start, end - suffix)) >= 0) {
            push(rules, ends, chars, end - suffix, end);
            end -= suffix;
            break;
        }
        if (prefix)
            push(rules, found, chars, start, start + prefix);
        if (suffix)
            push(rules, ends, chars, end - suffix, end);
        start += prefix;
        end -= suffix;
    }
    if (special >= 0)
        push_special(rules, found, chars, start, special);
    else if (start < end)
        cut_infixes(rules, found, chars, start, end);
    for (int64_t i = ends->count; i-- > 0;)
        push(rules, found, chars, ends->at[i].start, ends->at[i].end);
}

/* The chunks of a text; runs of white space but a single blank, and what follows one, are words of their own. */
static void cut_text(struct rules *rules, struct spans *found, struct spans *ends, const code *chars, int64_t length, int specials) {
    found->count = 0;
    for (int64_t start = 0; start < length;) {
        const uint32_t blank = rules->classes[chars[start]] & SPACE;
        int64_t end = start + 1;
        while (end < length && (rules->classes[chars[end]] & SPACE) == blank)
            end++;
        if (!blank)
            cut_chunk(rules, found, ends, chars, start, end, specials);
        else if (start + (start && chars[start] == ' ') < end)
            push(rules, found, chars, start + (start && chars[start] == ' '), end);
        start = end;
    }
}

struct match { int64_t start, end, special; };

static int by_length(const void *one, const void *other) { /* the longest first, then the first */
    const struct match *a = one, *b = other;
    const int64_t order = (b->end - b->start) - (a->end - a->start);
    return order ? (order > 0) - (order < 0) : (a->start > b->start) - (a->start < b->start);
}

static int by_start(const void *one, const void *other) {
    const struct match *a = one, *b = other;
    return (a->start > b->start) - (a->start < b->start);
}

static int equal_words(const code *chars, const struct span *word, const code *others, const struct span *other) {
    const int64_t length = word->end - word->start;
    return word->hash == other->hash && length == other->end - other->start &&
           same(chars + word->start, others + other->start, length);
}

/* Whether the words of a special case, as the other rules would cut it, are at `i`. */
static int is_pattern(const struct rules *rules, const struct pattern *pattern, const code *chars, const struct spans *words, int64_t i) {
    if (i + pattern->count > words->count)
        return 0;
    for (int64_t j = 0; j < pattern->count; j++)
        if (!equal_words(chars, words->at + i + j, rules->specials.chars, rules->pattern_words.at + pattern->first + j))
            return 0;
    return 1;
}

/* The special cases among the words, which may overlap. Returns their number. */
static int64_t find_patterns(struct rules *rules, const code *chars, const struct spans *words, struct match **matches) {
    int64_t count = 0, room = 0;
    for (int64_t i = 0; i < words->count; i++) {
        for (int64_t p = rules->heads[words->at[i].hash % HEADS]; p; p = rules->patterns[p - 1].next) {
            const struct pattern *pattern = rules->patterns + p - 1;
            if (!is_pattern(rules, pattern, chars, words, i))
                continue;
            if (count == room) {
                room = room ? 2 * room : 64;
                struct match *more = realloc(*matches, (size_t)room * sizeof *more);
                if (!more) {
                    rules->failed = 1;
                    return count;
                }
                *matches = more;
            }
            (*matches)[count++] = (struct match){i, i + pattern->count, pattern->special};
        }
    }
    return count;
}

/* Keep matches whose ends no longer one covers, by their start. Returns their number. */
static int64_t without_overlaps(struct match *matches, int64_t count, uint8_t *seen) {
    int64_t kept = 0;
    qsort(matches, (size_t)count, sizeof *matches, by_length);
    for (int64_t m = 0; m < count; m++) {
        const struct match match = matches[m];
        const int free = !seen[match.start] && !seen[match.end - 1];
        memset(seen + match.start, 1, (size_t)(match.end - match.start));
        if (free)
            matches[kept++] = match;
    }
    qsort(matches, (size_t)kept, sizeof *matches, by_start);
    return kept;
}

static int is_contiguous(const struct spans *words, const struct match *match) {
    for (int64_t i = match->start + 1; i < match->end; i++)
        if (words->at[i].start != words->at[i - 1].end)
            return 0;
    return 1;
}

/* Put special cases in place of the words that the other rules cut them into. */
static void restore_specials(struct rules *rules, struct spans *words, struct spans *other, const code *chars) {
    struct match *matches = NULL;
    int64_t count = find_patterns(rules, chars, words, &matches), next = 0;
    uint8_t *seen = count ? calloc((size_t)words->count, 1) : NULL;
    if (count && !seen)
        rules->failed = 1;
    if (seen && !rules->failed) {
        count = without_overlaps(matches, count, seen);
        other->count = 0;
        for (int64_t i = 0; i < words->count;) {
            const struct match *match = next < count && matches[next].start == i ? matches + next++ : NULL;
            const int64_t stop = match ? match->end : i + 1;
            if (match && is_contiguous(words, match))
                push_special(rules, other, chars, words->at[i].start, match->special);
            else
                for (int64_t j = i; j < stop; j++)
                    push(rules, other, chars, words->at[j].start, words->at[j].end);
            i = stop;
        }
        const struct spans swapped = *words;
        *words = *other;
        *other = swapped;
    }
    free(matches);
    free(seen);
}

static void split(struct rules *rules, struct scratch *own, struct spans *words, const code *chars, int64_t length) {
    cut_text(rules, words, &own->pieces, chars, length, 1);
    restore_specials(rules, words, &own->other, chars);
}

static int has_infix(const struct rules *rules, const code *chars, int64_t start, int64_t end) {
    for (int64_t i = start; i < end; i++)
        if (infix_at(rules, chars, start, end, i))
            return 1;
    return 0;
}

/* The special cases that other rules would cut, as the words that they become. */
static int find_special_patterns(struct rules *rules) {
    const struct strings *specials = &rules->specials;
    struct spans ends = {0}, found = {0};
    rules->patterns = malloc((size_t)(specials->count + 1) * sizeof *rules->patterns);
    if (!rules->patterns)
        return 0;
    for (int64_t i = 0; i < specials->count; i++) {
        const int64_t start = specials->bounds[i], end = specials->bounds[i + 1];
        const code *chars = specials->chars;
        if (!prefix_of(rules, chars, start, end) && !suffix_of(rules, chars, start, end) && !has_infix(rules, chars, start, end))
            continue;
        found.count = 0;
        cut_chunk(rules, &found, &ends, chars, start, end, 0);
        if (rules->failed)
            break;
        int64_t *head = rules->heads + found.at[0].hash % HEADS;
        rules->patterns[rules->pattern_count] = (struct pattern){i, rules->pattern_words.count, found.count, *head};
        *head = ++rules->pattern_count;
        for (int64_t j = 0; j < found.count; j++)
            push(rules, &rules->pattern_words, chars, found.at[j].start, found.at[j].end);
    }
    free(ends.at);
    free(found.at);
    return !rules->failed;
}

/* ---- repetitions ---- */

/* Give equal words equal numbers, in the order of their first places; white space gets none. Returns the number of words. */
static int64_t number_words(const struct rules *rules, struct scratch *own, const code *chars) {
    const struct spans *words = &own->words;
    const uint64_t mask = slots_for(words->count) - 1;
    int64_t count = 0;
    own->distinct = 0;
    memset(own->slots, 0, (mask + 1) * sizeof *own->slots);
    for (int64_t i = 0; i < words->count; i++) {
        const struct span *word = words->at + i;
        if (rules->classes[chars[word->start]] & SPACE)
            continue;
        uint64_t at = word->hash;
        uint32_t known;
        while ((known = own->slots[at & mask]) && !equal_words(chars, words->at + own->numbers[known - 1], chars, word))
            at++;
        if (!known)
            own->slots[at & mask] = (uint32_t)count + 1;
        own->numbers[count] = (uint32_t)i;
        own->ids[count++] = known ? own->ids[known - 1] : own->distinct++;
    }
    return count;
}

/* Extend runs of words, `grams`, by the words `behind` them: equal runs get equal numbers, in the order of their first places.
   Returns how many different ones there are. */
static uint32_t extend_grams(struct scratch *own, int64_t count, int64_t behind) {
    const uint64_t mask = slots_for(count) - 1;
    uint32_t distinct = 0;
    uint64_t *keys = own->hashes; /* of each run's first place */
    memset(own->slots, 0, (mask + 1) * sizeof *own->slots);
    for (int64_t i = 0; i < count; i++) {
        const uint64_t key = (uint64_t)own->grams[i] << 32 | own->ids[i + behind];
        uint64_t at = mixed(key * 0x9FB21C651E98DF25u);
        while (own->slots[at & mask] && keys[own->slots[at & mask] - 1] != key)
            at++;
        if (!own->slots[at & mask]) {
            keys[distinct] = key;
            own->slots[at & mask] = ++distinct;
        }
        own->grams[i] = own->slots[at & mask] - 1;
    }
    return distinct;
}

static inline uint32_t word_length(const struct scratch *own, int64_t number) {
    const struct span *word = own->words.at + own->numbers[number];
    return word->end - word->start;
}

/* The characters of the most frequent run of `size` words, with blanks between them, times how often it occurs. */
static int64_t top_gram(const struct scratch *own, int64_t count, int64_t size, uint32_t distinct, uint32_t *tally) {
    uint32_t best = 0;
    int64_t first = 0, characters = size - 1;
    memset(tally, 0, distinct * sizeof *tally);
    for (int64_t i = 0; i < count; i++)
        tally[own->grams[i]]++;
    for (uint32_t id = 1; id < distinct; id++)
        if (tally[id] > tally[best])
            best = id;
    while (own->grams[first] != best)
        first++;
    for (int64_t i = first; i < first + size; i++)
        characters += word_length(own, i);
    return characters * tally[best];
}

static void top_grams(struct scratch *own, int64_t words, const int64_t *sizes, int64_t many, int64_t *found) {
    uint32_t distinct = own->distinct;
    int64_t size = 1;
    memcpy(own->grams, own->ids, (size_t)words * sizeof *own->grams);
    for (int64_t k = 0; k < many && sizes[k] <= words; k++) {
        for (; size < sizes[k]; size++)
            distinct = extend_grams(own, words - size, size);
        found[k] = top_gram(own, words - size + 1, size, distinct, own->slots);
    }
}

static inline uint64_t reduced(uint64_t value) {
    value = (value & PRIME) + (value >> 61);
    return value >= PRIME ? value - PRIME : value;
}

static inline uint64_t product(uint64_t one, uint64_t other) {
    const unsigned __int128 full = (unsigned __int128)one * other;
    return reduced(((uint64_t)full & PRIME) + (uint64_t)(full >> 61));
}

/* Words without anything between them, where each begins (in `grams`), and the hashes of what is before each. */
static void join_words(struct scratch *own, const code *chars, int64_t words) {
    int64_t length = 0;
    uint64_t sum = 0;
    for (int64_t i = 0; i < words; i++) {
        const struct span *word = own->words.at + own->numbers[i];
        own->grams[i] = (uint32_t)length;
        own->prefix[i] = sum;
        for (uint32_t at = word->start; at < word->end; at++) {
            own->joined[length++] = chars[at];
            sum = reduced(product(sum, BASE) + chars[at] + 1);
        }
    }
    own->grams[words] = (uint32_t)length;
    own->prefix[words] = sum;
    for (; own->powers_ready <= length; own->powers_ready++)
        own->powers[own->powers_ready] = own->powers_ready ? product(own->powers[own->powers_ready - 1], BASE) : 1;
}

/* The characters of runs of `size` words that have occurred before; such runs are skipped as a whole. */
static int64_t repeated_grams(struct scratch *own, int64_t words, int64_t size) {
    const uint64_t mask = slots_for(words) - 1;
    const uint32_t *begins = own->grams;
    int64_t repeated = 0;
    memset(own->slots, 0, (mask + 1) * sizeof *own->slots);
    for (int64_t i = 0; i + size <= words;) {
        const uint32_t start = begins[i], length = begins[i + size] - start;
        const uint64_t sum = reduced(own->prefix[i + size] + PRIME - product(own->prefix[i], own->powers[length]));
        uint64_t at = mixed(sum * 0x9FB21C651E98DF25u);
        uint32_t found;
        own->hashes[i] = sum;
        while ((found = own->slots[at & mask])) {
            const uint32_t other = begins[found - 1];
            if (own->hashes[found - 1] == sum && begins[found - 1 + size] - other == length &&
                same(own->joined + other, own->joined + start, length))
                break;
            at++;
        }
        if (!found)
            own->slots[at & mask] = (uint32_t)i + 1;
        repeated += found ? length : 0;
        i += found ? size : 1;
    }
    return repeated;
}

/* Parts of a text, and how many of them have occurred before, with how many characters. */
struct parts { int64_t count, repeated, characters; };

static void add_part(struct scratch *own, struct parts *parts, uint64_t mask, const code *chars, int64_t start, int64_t end) {
    const struct span part = {(uint32_t)start, (uint32_t)end, hash_of(chars, start, end)};
    struct span *known = own->other.at;
    uint64_t at = part.hash;
    while (own->slots[at & mask] && !equal_words(chars, known + own->slots[at & mask] - 1, chars, &part))
        at++;
    if (own->slots[at & mask]) {
        parts->repeated++;
        parts->characters += end - start;
    } else {
        known[parts->count - parts->repeated] = part;
        own->slots[at & mask] = (uint32_t)(parts->count - parts->repeated) + 1;
    }
    parts->count++;
}

/* Memory for `count` parts. */
static uint64_t room_for_parts(struct rules *rules, struct scratch *own, int64_t count) {
    if (own->other.room < count) {
        struct span *at = realloc(own->other.at, (size_t)count * sizeof *at);
        if (at) {
            own->other.at = at;
            own->other.room = count;
        } else
            rules->failed = 1;
    }
    const uint64_t slots = slots_for(count);
    memset(own->slots, 0, slots * sizeof *own->slots);
    return slots - 1;
}

/* The parts of [start, end) between runs of at least `least` new lines. */
static struct parts parts_between(struct rules *rules, struct scratch *own, const code *chars, int64_t start, int64_t end,
                                  int64_t new_lines, int64_t least) {
    struct parts parts = {0, 0, 0};
    const uint64_t mask = room_for_parts(rules, own, new_lines / least + 1);
    int64_t from = start;
    for (int64_t i = start; i < end && !rules->failed;) {
        int64_t breaks = 0;
        while (i + breaks < end && chars[i + breaks] == '\n')
            breaks++;
        if (breaks >= least) {
            add_part(own, &parts, mask, chars, from, i);
            from = i + breaks;
        }
        i += breaks ? breaks : 1;
    }
    if (!rules->failed)
        add_part(own, &parts, mask, chars, from, end);
    return parts;
}

static void strip(const struct rules *rules, const code *chars, int64_t *start, int64_t *end) {
    while (*start < *end && rules->classes[chars[*start]] & SPACE)
        ++*start;
    while (*end > *start && rules->classes[chars[*end - 1]] & SPACE)
        --*end;
}

static void count_repetitions(struct rules *rules, struct scratch *own, const code *chars, int64_t length, int64_t words,
                              const int64_t *sizes, int64_t tops, int64_t all, int64_t *found) {
    int64_t start = 0, end = length;
    strip(rules, chars, &start, &end);
    const struct parts paragraphs = parts_between(rules, own, chars, start, end, found[NEW_LINES], 2);
    const struct parts blocks = parts_between(rules, own, chars, 0, length, found[NEW_LINES], 1);
    if (rules->failed)
        return;
    found[PARAGRAPHS] = paragraphs.count;
    found[REPEATED_PARAGRAPHS] = paragraphs.repeated;
    found[REPEATED_PARAGRAPH_CHARACTERS] = paragraphs.characters;
    found[BLOCKS] = blocks.count;
    found[REPEATED_BLOCKS] = blocks.repeated;
    found[REPEATED_BLOCK_CHARACTERS] = blocks.characters;
    top_grams(own, words, sizes, tops, found + FIXED_COUNTS);
    join_words(own, chars, words);
    for (int64_t k = tops; k < all; k++)
        found[FIXED_COUNTS + k] = repeated_grams(own, words, sizes[k]);
}

/* ---- quality ---- */

static int ends_in_ellipsis(const code *chars, int64_t start, int64_t end) {
    return (end > start && chars[end - 1] == 0x2026) ||
           (end - start > 2 && chars[end - 1] == '.' && chars[end - 2] == '.' && chars[end - 3] == '.');
}

/* The end of the line that begins at `start`, without its break, and where the next one begins. */
static int64_t line_end(const struct rules *rules, const code *chars, int64_t start, int64_t length, int64_t *next) {
    int64_t end = start;
    while (end < length && !(rules->classes[chars[end]] & LINE_BREAK))
        end++;
    *next = end + (end < length) + (end + 1 < length && chars[end] == '\r' && chars[end + 1] == '\n');
    return end;
}

static void count_lines(const struct rules *rules, const code *chars, int64_t length, int64_t *found) {
    for (int64_t start = 0, next; start < length; start = next) {
        int64_t from = start, to = line_end(rules, chars, start, length, &next);
        strip(rules, chars, &from, &to);
        found[LINES]++;
        found[BULLET_LINES] += from < to && (chars[from] == 0x2022 || chars[from] == '-');
        found[ELLIPSIS_LINES] += ends_in_ellipsis(chars, from, to);
    }
}

static void count_symbols(const code *chars, int64_t length, int64_t *found) {
    for (int64_t i = 0; i < length; i++) {
        found[HASHES] += chars[i] == '#';
        found[ELLIPSES] += chars[i] == 0x2026;
        if (chars[i] == '.' && i + 2 < length && chars[i + 1] == '.' && chars[i + 2] == '.') {
            found[ELLIPSES]++;
            i += 2;
        }
    }
}

static void count_words(const struct rules *rules, struct scratch *own, const code *chars, int64_t text, int64_t *found) {
    for (int64_t i = 0; i < own->words.count; i++) {
        const struct span *word = own->words.at + i;
        uint32_t all = SYMBOL, any = 0;
        for (uint32_t at = word->start; at < word->end; at++) {
            const uint32_t kind = rules->classes[chars[at]];
            all &= kind;
            any |= kind;
        }
        if (any & SPACE)
            continue;
        found[PLAIN_WORDS] += !all;
        found[PLAIN_CHARACTERS] += all ? 0 : word->end - word->start;
        found[ALPHABETIC_WORDS] += (any & LETTER) != 0;
        const int64_t stop = find_string(&rules->stop_words, chars, word);
        if (stop >= 0 && own->seen[stop] != text) {
            own->seen[stop] = text;
            found[STOP_WORDS]++;
        }
    }
}

static void count_filled_lines(struct rules *rules, struct scratch *own, const code *chars, int64_t length, int64_t shortest,
                               int64_t *found) {
    struct parts parts = {0, 0, 0};
    const uint64_t mask = room_for_parts(rules, own, found[NEW_LINES] + 1);
    for (int64_t start = 0, end; start <= length && !rules->failed; start = end + 1) {
        int64_t from = start;
        for (end = start; end < length && chars[end] != '\n';)
            end++;
        while (from < end && rules->classes[chars[from]] & SPACE)
            from++;
        if (from == end)
            continue;
        found[ENDED_LINES] += (rules->classes[chars[end - 1]] & LINE_END) != 0;
        found[SHORT_LINES] += end - start <= shortest;
        add_part(own, &parts, mask, chars, start, end);
    }
    found[FILLED_LINES] = parts.count;
    found[REPEATED_LINE_CHARACTERS] = parts.characters;
}

/* ---- lines as C4 keeps them ---- */

/* The length of the citation at the beginning of [at, end): [12], [edit] or [citation needed]; 0 if there is none. */
static int64_t citation(const struct rules *rules, const code *at, const code *end) {
    static const char *const words[] = {"edit]", "citation needed]"};
    const code *stop = at + 1;
    if (*at != '[')
        return 0;
    while (stop < end && rules->classes[*stop] & DIGIT)
        stop++;
    if (stop < end && *stop == ']')
        return stop + 1 - at;
    for (int w = 0; w < 2; w++) {
        const int64_t length = (int64_t)strlen(words[w]);
        if (end - at > length && is_text(at + 1, length, words[w]))
            return length + 1;
    }
    return 0;
}

/* Copy a line without its citations to `line`. Returns its length, or -1 if it has none. */
static int64_t without_citations(const struct rules *rules, const code *at, const code *end, code *line) {
    int64_t count = 0, removed = 0;
    while (at < end) {
        const int64_t length = citation(rules, at, end);
        if (length) {
            at += length;
            removed++;
        } else
            line[count++] = *at++;
    }
    return removed ? count : -1;
}

static inline code lowered(code c) {
    return c - 'A' < 26u ? c + 32 : c == 0x212A ? 'k' : c; /* the sign of kelvin is the only other one */
}

/* The phrases that a line holds, a bit each. */
static uint64_t phrases_in(const struct rules *rules, const code *line, int64_t length) {
    const struct strings *phrases = &rules->phrases;
    uint64_t starts[128] = {0}, found = 0;
    for (int64_t p = 0; p < phrases->count; p++)
        starts[phrases->chars[phrases->bounds[p]] & 127] |= (uint64_t)1 << p;
    for (int64_t i = 0; i < length; i++) {
        const code c = lowered(line[i]);
        uint64_t possible = c < 128 ? starts[c] & ~found : 0;
        for (int64_t p = 0; possible; p++, possible >>= 1) {
            const int64_t from = phrases->bounds[p], size = phrases->bounds[p + 1] - from;
            int64_t k = 0;
            if (!(possible & 1) || i + size > length)
                continue;
            while (k < size && lowered(line[i + k]) == phrases->chars[from + k])
                k++;
            found |= (uint64_t)(k == size) << p;
        }
    }
    return found;
}

/* The number of sentences that the words [from, to) make, at least 1. */
static int64_t sentences(const struct rules *rules, const code *chars, const struct span *from, const struct span *to) {
    int64_t count = 1;
    int ended = 0;
    for (; from < to; from++) {
        uint32_t all = PUNCTUATION;
        const int ends = from->end - from->start == 1 && rules->classes[chars[from->start]] & SENTENCE_END;
        for (uint32_t at = from->start; at < from->end; at++)
            all &= rules->classes[chars[at]];
        if (ended && !all && !ends) {
            count++;
            ended = 0;
        } else if (ends)
            ended = 1;
    }
    return count;
}

static uint8_t *encode(code c, uint8_t *to) {
    if (c < 0x80)
        *to++ = (uint8_t)c;
    else if (c < 0x800) {
        *to++ = (uint8_t)(0xC0 | c >> 6);
        *to++ = (uint8_t)(0x80 | (c & 0x3F));
    } else {
        if (c < 0x10000)
            *to++ = (uint8_t)(0xE0 | c >> 12);
        else {
            *to++ = (uint8_t)(0xF0 | c >> 18);
            *to++ = (uint8_t)(0x80 | (c >> 12 & 0x3F));
        }
        *to++ = (uint8_t)(0x80 | (c >> 6 & 0x3F));
        *to++ = (uint8_t)(0x80 | (c & 0x3F));
    }
    return to;
}

/* A line to judge: its characters and those of its words, and the words themselves. */
struct line { const code *chars; int64_t length, words, longest; };

/* Why a line is removed: the count to increase; 0 if it stays. */
static int removed_as(const struct rules *rules, const struct line *line, const int64_t *limits) {
    const code last = line->length ? line->chars[line->length - 1] : 0;
    if (limits[LONGEST_WORD] >= 0 && line->longest > limits[LONGEST_WORD])
        return LONG_WORD_LINES;
    const int ended = last == '.' || last == '?' || last == '!' || last == '"' || last == '\'';
    if (limits[TERMINAL] && (!ended || (last == '.' && ends_in_ellipsis(line->chars, 0, line->length))))
        return UNENDED_LINES;
    if (line->words < limits[LEAST_WORDS])
        return FEW_WORD_LINES;
    const uint64_t phrases = phrases_in(rules, line->chars, line->length);
    if (limits[LOREM] && phrases & 1)
        return LOREM_IPSUM;
    if (limits[JAVASCRIPT] && phrases & 2)
        return JAVASCRIPT_LINES;
    for (int64_t i = 0; limits[CURLY] && i < line->length; i++)
        if (line->chars[i] == '{')
            return CURLY_BRACKET;
    return limits[POLICY] && phrases >> 2 ? POLICY_LINES : 0;
}

static void count_line_words(const struct rules *rules, struct line *line) {
    for (int64_t i = 0, run = 0; i <= line->length; i++)
        if (i < line->length && !(rules->classes[line->chars[i]] & SPACE))
            run++;
        else {
            line->words += run > 0;
            line->longest = run > line->longest ? run : line->longest;
            run = 0;
        }
}

/* Count the sentences of the lines that stay, and write these lines to `edited`. Returns its end. */
static uint8_t *clean_lines(struct rules *rules, struct scratch *own, const code *chars, int64_t length, const int64_t *limits,
                            int64_t *found, uint8_t *edited) {
    int64_t next_word = 0, count = 0, first_kept = 0;
    for (int64_t start = 0, next; start < length && !found[LOREM_IPSUM] && !found[CURLY_BRACKET]; start = next) {
        int64_t from = start, to = line_end(rules, chars, start, length, &next);
        strip(rules, chars, &from, &to);
        struct line line = {chars + from, to - from, 0, 0};
        count_line_words(rules, &line);
        const int64_t shorter = limits[CITATIONS] ? without_citations(rules, chars + from, chars + to, own->line) : -1;
        if (shorter >= 0) {
            line.chars = own->line;
            line.length = shorter;
        }
        const int removed = removed_as(rules, &line, limits);
        if (removed) {
            found[removed]++;
            continue;
        }
        const struct spans *words = shorter >= 0 ? &own->line_words : &own->words;
        int64_t first = 0, end;
        if (shorter >= 0) {
            split(rules, own, &own->line_words, line.chars, line.length);
            end = words->count;
        } else {
            while (next_word < words->count && words->at[next_word].start < from)
                next_word++;
            for (first = end = next_word; end < words->count && words->at[end].start < to;)
                end++;
            next_word = end;
        }
        found[SENTENCES] += sentences(rules, shorter >= 0 ? line.chars : chars, words->at + first, words->at + end);
        memcpy(own->joined + count, line.chars, (size_t)line.length * sizeof *line.chars);
        count += line.length;
        own->joined[count++] = '\n';
    }
    strip(rules, own->joined, &first_kept, &count);
    for (int64_t i = first_kept; i < count; i++)
        edited = encode(own->joined[i], edited);
    return edited;
}

/* ---- all counts of all texts ---- */

static int64_t decode(const uint8_t *at, const uint8_t *end, code *chars) {
    int64_t count = 0;
    while (at < end) {
        const int length = *at < 0x80 ? 1 : *at < 0xE0 ? 2 : *at < 0xF0 ? 3 : 4;
        if (length == 1)
            chars[count++] = *at;
        else if (end - at < length)
            break;
        else if (length == 2)
            chars[count++] = (code)(at[0] & 0x1F) << 6 | (at[1] & 0x3F);
        else if (length == 3)
            chars[count++] = (code)(at[0] & 0xF) << 12 | (code)(at[1] & 0x3F) << 6 | (at[2] & 0x3F);
        else
            chars[count++] = ((code)(at[0] & 7) << 18 | (code)(at[1] & 0x3F) << 12 | (code)(at[2] & 0x3F) << 6 | (at[3] & 0x3F));
        at += length;
    }
    return count;
}

static int grow(void **memory, int64_t items, size_t size) {
    void *more = realloc(*memory, (size_t)items * size);
    if (more)
        *memory = more;
    return more != NULL;
}

static int room_for_text(struct scratch *own, int64_t bytes) {
    const int64_t room = bytes + 1;
    if (room <= own->room)
        return 1;
    own->room = room;
    return grow((void **)&own->chars, room, sizeof *own->chars) && grow((void **)&own->line, room, sizeof *own->line) &&
           grow((void **)&own->joined, room, sizeof *own->joined) && grow((void **)&own->powers, room + 1, sizeof *own->powers);
}

static int room_for_words(struct scratch *own, int64_t words, int64_t lines) {
    const int64_t slots = (int64_t)slots_for(words > lines ? words : lines);
    if (slots > own->slot_room && !grow((void **)&own->slots, own->slot_room = slots, sizeof *own->slots))
        return 0;
    if (words + 1 <= own->word_room)
        return 1;
    own->word_room = words + 1;
    return grow((void **)&own->ids, own->word_room, sizeof *own->ids) && grow((void **)&own->grams, own->word_room, sizeof *own->grams) &&
           grow((void **)&own->numbers, own->word_room, sizeof *own->numbers) &&
           grow((void **)&own->prefix, own->word_room, sizeof *own->prefix) && grow((void **)&own->hashes, own->word_room, sizeof *own->hashes);
}

static void release(struct rules *rules, struct scratch *own) {
    void *all[] = {rules->specials.slots, rules->units.slots, rules->stop_words.slots, rules->patterns, rules->pattern_words.at,
                   own->chars, own->line, own->joined, own->words.at, own->line_words.at, own->other.at, own->pieces.at, own->slots,
                   own->ids, own->grams, own->numbers, own->powers, own->prefix, own->hashes, own->seen};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static int prepare(struct rules *rules, struct scratch *own) {
    for (int64_t i = 0; i < rules->units.count; i++) {
        const int64_t length = rules->units.bounds[i + 1] - rules->units.bounds[i];
        rules->longest_unit = length > rules->longest_unit ? length : rules->longest_unit;
    }
    own->seen = malloc((size_t)(rules->stop_words.count + 1) * sizeof *own->seen);
    if (!own->seen || !fill_strings(&rules->specials) || !fill_strings(&rules->units) || !fill_strings(&rules->stop_words))
        return 0;
    memset(own->seen, 0xFF, (size_t)(rules->stop_words.count + 1) * sizeof *own->seen);
    return find_special_patterns(rules);
}

/* Count what the rules compare in texts: text i is [bounds[i], bounds[i + 1]) of `text`, and its counts are row i of `found`,
   FIXED_COUNTS and one for each of `sizes`: the `tops` first are those of most frequent runs of words, ascending, the others, to
   `all`, those of repeated ones. `edited` gets the lines that C4 keeps, if they are wanted, with bounds `edited_bounds`, and takes as
   many bytes as `text`. Returns 0, or -1 if memory is short. */
int64_t measure(const uint8_t *text, const int64_t *bounds, int64_t texts, const uint32_t *classes, const code *strings,
                const int64_t *string_bounds, const int64_t *set_bounds, const int64_t *pieces, const int64_t *piece_bounds,
                int64_t wanted, const int64_t *limits, const int64_t *sizes, int64_t tops, int64_t all, int64_t *found,
                uint8_t *edited, int64_t *edited_bounds) {
    struct strings sets[4];
    for (int s = 0; s < 4; s++)
        sets[s] = (struct strings){strings, string_bounds + set_bounds[s], set_bounds[s + 1] - set_bounds[s], NULL, 0};
    struct rules *rules = calloc(1, sizeof *rules);
    struct scratch own = {0};
    if (!rules)
        return -1;
    rules->classes = classes;
    rules->specials = sets[0];
    rules->units = sets[1];
    rules->stop_words = sets[2];
    rules->phrases = sets[3];
    rules->pieces = pieces;
    rules->piece_bounds = piece_bounds;
    rules->failed = !prepare(rules, &own);
    uint8_t *to = edited;
    for (int64_t i = 0; i < texts && !rules->failed; i++, found += FIXED_COUNTS + all) {
        edited_bounds[i] = to - edited;
        if (!room_for_text(&own, bounds[i + 1] - bounds[i])) {
            rules->failed = 1;
            break;
        }
        const int64_t length = decode(text + bounds[i], text + bounds[i + 1], own.chars);
        memset(found, 0, (size_t)(FIXED_COUNTS + all) * sizeof *found);
        found[CHARACTERS] = length;
        for (int64_t c = 0; c < length; c++)
            found[NEW_LINES] += own.chars[c] == '\n';
        split(rules, &own, &own.words, own.chars, length);
        if (rules->failed || !room_for_words(&own, own.words.count, found[NEW_LINES] + 1)) {
            rules->failed = 1;
            break;
        }
        found[WORDS] = number_words(rules, &own, own.chars);
        if (wanted & REPETITION)
            count_repetitions(rules, &own, own.chars, length, found[WORDS], sizes, tops, all, found);
        if (wanted & QUALITY) {
            count_symbols(own.chars, length, found);
            count_lines(rules, own.chars, length, found);
            count_words(rules, &own, own.chars, i, found);
        }
        if (wanted & FINEWEB)
            count_filled_lines(rules, &own, own.chars, length, limits[SHORT_LINE], found);
        if (wanted & CLEAN_LINES)
            to = clean_lines(rules, &own, own.chars, length, limits, found, to);
    }
    edited_bounds[texts] = to - edited;
    const int failed = rules->failed;
    release(rules, &own);
    free(rules);
    return failed ? -1 : 0;
}
