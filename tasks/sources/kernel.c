/*
What orjson may lose of JSON text, told from the text alone, in plain C.

`exact_json.py` calls `doubts` with ctypes, so Python's headers are not needed and other threads run meanwhile. The text is known to
be valid: values of JSON in UTF-8, one after the other. Strings are skipped with memchr, so long texts take little time.
*/

#include <stdint.h>
#include <string.h>

enum { INEXACT = 1, DEEP = 2, BROKEN = 4 };
enum { SHALLOW = 254, MOST_LEVELS = 1024, MOST_KEYS = 1024 }; /* what orjson writes, what it reads, and keys of open objects */
enum { UNSIGNED_DIGITS = 19, SIGNED_DIGITS = 18 }; /* as many as any 64-bit integer can have */

struct level { int object, keys; }; /* `keys` is the number of keys in the levels around */

static inline int digit(uint8_t c) {
    return (uint8_t)(c - '0') < 10;
}

/* The closing quote of the string that begins at `at`. */
static const uint8_t *closing(const uint8_t *at, const uint8_t *end) {
    for (const uint8_t *quote = at;; quote++) {
        quote = memchr(quote, '"', (size_t)(end - quote));
        const uint8_t *before = quote;
        while (before > at && before[-1] == '\\')
            before--;
        if ((quote - before) % 2 == 0)
            return quote;
    }
}

/* A hash of a key; equal keys have equal hashes. */
static uint64_t hash_of(const uint8_t *at, const uint8_t *end) {
    uint64_t sum = (uint64_t)(end - at);
    for (; at < end; at++)
        sum = (sum ^ *at) * 0x9FB21C651E98DF25u, sum ^= sum >> 29;
    return sum;
}

/* Whether a key is certainly another than the `count` keys of its object before it, to which it is added. */
static int distinct(const uint8_t *at, const uint8_t *end, uint64_t *keys, int count) {
    keys[count] = hash_of(at, end);
    for (int i = 0; i < count; i++)
        if (keys[i] == keys[count])
            return 0;
    return memchr(at, '\\', (size_t)(end - at)) == NULL; /* an escape may spell another key */
}

/* The end of the number at `at`; `exact` becomes 0 for an integer that 64 bits may not hold. */
static const uint8_t *number(const uint8_t *at, const uint8_t *end, int *exact) {
    const int negative = *at == '-';
    const uint8_t *whole = at + negative, *to = whole;
    while (to < end && digit(*to))
        to++;
    if (to < end && (*to == '.' || *to == 'e' || *to == 'E')) {
        while (to < end && (digit(*to) || *to == '.' || *to == 'e' || *to == 'E' || *to == '+' || *to == '-'))
            to++;
        return to;
    }
    *exact &= to - whole <= (negative ? SIGNED_DIGITS : UNSIGNED_DIGITS);
    return to;
}

/*
INEXACT unless certainly every integer fits 64 bits, and no object repeats a key; DEEP for more levels than orjson writes; BROKEN
if there is a line break between values.
*/
int64_t doubts(const uint8_t *at, int64_t length) {
    const uint8_t *end = at + length;
    uint64_t keys[MOST_KEYS];
    struct level levels[MOST_LEVELS + 1] = {{0, 0}};
    int level = 0, deepest = 0, held = 0, key = 0, exact = 1, broken = 0;
    while (at < end) {
        const uint8_t c = *at++;
        if (c == '"') {
            const uint8_t *quote = closing(at, end);
            if (key) {
                exact &= held < MOST_KEYS && distinct(at, quote, keys + levels[level].keys, held - levels[level].keys);
                held += held < MOST_KEYS;
            }
            key = 0;
            at = quote + 1;
        } else if (c == '{' || c == '[') {
            key = c == '{';
            if (level == MOST_LEVELS)
                return INEXACT | DEEP | BROKEN;
            levels[++level] = (struct level){key, held};
            deepest = level > deepest ? level : deepest;
        } else if (c == '}' || c == ']') {
            held = levels[level--].keys;
            key = 0;
        } else if (c == ',') {
            key = levels[level].object;
        } else if (c == '-' || digit(c)) {
            at = number(at - 1, end, &exact);
        } else if (c == '\n' || c == '\r') {
            broken = 1;
        }
    }
    return (exact ? 0 : INEXACT) | (deepest > SHALLOW ? DEEP : 0) | (broken ? BROKEN : 0);
}
