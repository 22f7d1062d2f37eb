/*
The inner loops of deduplication, in plain C: normal form, units, shingles and band keys of many texts at a time.

`kernel.py` calls them with ctypes, so Python's headers are not needed and other threads run meanwhile. `shingles.py` and
`candidates.py` define what is computed; NumPy versions in `tests/dedup/reference.py` give the same bytes.

Texts are UTF-8, one after the other: text i is [bounds[i], bounds[i + 1]) of `text`. No byte outside of them is read, even
if they are not valid UTF-8. The caller provides results that are large enough: no function writes more items than there are
bytes of text, or units.
*/

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "hashes are computed from little-endian words"
#endif

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default"))) /* chosen when loaded */
#else
#define FOR_EACH_PROCESSOR
#endif

enum { WORD, CHARACTER, LETTER, PIECE };
enum { THREE_BYTES = 0xE0, FOUR_BYTES = 0xF0 }; /* first bytes of characters that take at least as many */
enum { LONGEST_WORD = 40, WINDOW = 4, CODES = 0x40000, BANDS = 32, ROWS = 4, PERMUTATIONS = BANDS * ROWS, FEW = 24 };

static const uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

/* The next draw of SplitMix64 in this state. */
static inline uint64_t splitmix64(uint64_t state) {
    state += GOLDEN;
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9u;
    state = (state ^ state >> 27) * 0x94D049BB133111EBu;
    return state ^ state >> 31;
}

/* The length in bytes of the white space character at the beginning of [at, end), 0 if it is another one. */
static inline int white_space(const uint8_t *at, const uint8_t *end) {
    if (*at <= ' ')
        return (uint8_t)(*at - 0x09) < 5 || (uint8_t)(*at - 0x1C) < 5;
    if (*at == 0xC2)
        return end - at > 1 && (at[1] == 0x85 || at[1] == 0xA0) ? 2 : 0;
    if (*at < 0xE1 || *at > 0xE3 || end - at < 3)
        return 0;
    switch ((uint32_t)at[0] << 16 | at[1] << 8 | at[2]) {
    case 0xE19A80: case 0xE280A8: case 0xE280A9: case 0xE280AF: case 0xE2819F: case 0xE38080:
        return 3;
    default:
        return at[0] == 0xE2 && at[1] == 0x80 && at[2] >= 0x80 && at[2] <= 0x8A ? 3 : 0;
    }
}

/* Write texts with every run of white space as one blank, and none at the ends, to `found`, and their bounds. */
void collapse(const uint8_t *text, const int64_t *bounds, int64_t texts, uint8_t *found, int64_t *found_bounds) {
    uint8_t *to = found;
    for (int64_t i = 0; i < texts; i++) {
        const uint8_t *at = text + bounds[i], *end = text + bounds[i + 1];
        uint8_t *first = to;
        found_bounds[i] = to - found;
        while (at < end) {
            const int blank = white_space(at, end);
            if (!blank)
                *to++ = *at++;
            else if (to > first && to[-1] != ' ')
                *to++ = ' ';
            at += blank;
        }
        if (to > first && to[-1] == ' ')
            to--;
    }
    found_bounds[texts] = to - found;
}

/* The kind of the character at the beginning of [at, end), which takes three bytes or more, and its length in bytes. */
static inline uint8_t kind_of(const uint8_t *at, const uint8_t *end, const uint8_t *table, int *length) {
    *length = *at >= FOUR_BYTES ? 4 : 3;
    if (end - at < *length)
        return WORD;
    uint32_t code = (uint32_t)(at[0] & (*length == 4 ? 0x7 : 0xF)) << 12 | (at[1] & 0x3F) << 6 | (at[2] & 0x3F);
    if (*length == 4)
        code = code << 6 | (at[3] & 0x3F);
    return code < CODES ? table[code] : WORD;
}

/* The first eight bytes of a unit as a number, with zeros behind its end. Other bytes may be read up to `limit`. */
static inline uint64_t eight(const uint8_t *at, ptrdiff_t length, const uint8_t *limit) {
    uint64_t bytes = 0;
    memcpy(&bytes, at, limit - at < 8 ? (size_t)(limit - at) : 8);
    return length < 8 ? bytes & ((uint64_t)1 << 8 * length) - 1 : bytes;
}

/* Hash a unit: its bytes, eight at a time, and their number. */
static inline uint64_t hash(const uint8_t *at, ptrdiff_t length, const uint8_t *limit) {
    uint64_t sum = splitmix64(eight(at, length, limit)) + (uint64_t)length;
    for (ptrdiff_t done = 8; done < length; done += 8)
        sum += splitmix64(eight(at + done, length - done, limit) ^ splitmix64((uint64_t)done));
    return splitmix64(sum);
}

static int begins_character(uint8_t byte) {
    return (byte & 0xC0) != 0x80;
}

/* Whether a long word has a cut before `at`, by the bytes before it. */
static int is_cut(const uint8_t *at) {
    uint32_t window;
    memcpy(&window, at - WINDOW, WINDOW);
    return begins_character(*at) && window * 0x9E3779B1u >> 30 == 0;
}

static int is_long(const uint8_t *at, const uint8_t *end) {
    int characters = 0;
    if (end - at > LONGEST_WORD)
        for (; at < end && characters <= LONGEST_WORD; at++)
            characters += begins_character(*at);
    return characters > LONGEST_WORD;
}

/* Where the unit ends that begins at `at`, and its kind. */
static const uint8_t *unit_end(const uint8_t *at, const uint8_t *end, const uint8_t *table, uint8_t *kind) {
    int length;
    *kind = *at >= THREE_BYTES ? kind_of(at, end, table, &length) : WORD;
    if (*kind != WORD)
        return at + length;
    for (at++; at < end && *at != ' '; at++)
        if (*at >= THREE_BYTES && kind_of(at, end, table, &length) != WORD)
            break;
    return at;
}

struct units {
    const uint8_t *text, *limit;
    uint64_t *hashes;
    uint8_t *kinds;
    int64_t *starts;
    int64_t count;
};

static inline void append(struct units *found, const uint8_t *start, const uint8_t *end, uint8_t kind) {
    found->hashes[found->count] = hash(start, end - start, found->limit);
    found->kinds[found->count] = kind;
    found->starts[found->count++] = start - found->text;
}

/* The units of texts in normal form: their hashes, kinds (of code points: `table`) and the bytes at which they begin. Those of
   text i are [firsts[i], firsts[i + 1]). Returns their number. */
int64_t units(const uint8_t *text, const int64_t *bounds, int64_t texts, const uint8_t *table, uint64_t *hashes,
              uint8_t *kinds, int64_t *starts, int64_t *firsts) {
    struct units found = {text, text + bounds[texts], hashes, kinds, starts, 0};
    for (int64_t i = 0; i < texts; i++) {
        const uint8_t *start = text + bounds[i], *end = text + bounds[i + 1];
        firsts[i] = found.count;
        while (start < end) {
            uint8_t kind;
            const uint8_t *stop = unit_end(start, end, table, &kind);
            if (kind == WORD && is_long(start, stop)) {
                kind = PIECE;
                for (const uint8_t *at = start + WINDOW; at < stop; at++)
                    if (is_cut(at)) {
                        append(&found, start, at, PIECE);
                        start = at;
                    }
            }
            append(&found, start, stop, kind);
            start = stop + (stop < end && *stop == ' ');
        }
    }
    firsts[texts] = found.count;
    return found.count;
}

/* The hash of a run of units, by their order. */
static inline uint64_t run_hash(const uint64_t *hashes, int64_t start, int64_t end) {
    uint64_t sum = 0;
    while (end > start)
        sum = sum * GOLDEN + hashes[--end];
    return splitmix64(sum);
}

/* The hashes of the shortest runs of a weight of `least` or more, from each unit, and their bounds by text. A text that weighs
   less is one run. `weights` are those of the kinds. Returns their number. */
int64_t shingles(const uint64_t *hashes, const uint8_t *kinds, const int64_t *bounds, int64_t texts, const int64_t *weights,
                 int64_t least, uint64_t *found, int64_t *found_bounds) {
    int64_t count = 0;
    for (int64_t i = 0; i < texts; i++) {
        int64_t end = bounds[i], weight = 0;
        found_bounds[i] = count;
        for (int64_t start = bounds[i]; start < bounds[i + 1]; start++) {
            while (weight < least && end < bounds[i + 1])
                weight += weights[kinds[end++]];
            if (weight < least && start > bounds[i])
                break;
            found[count++] = run_hash(hashes, start, end);
            weight -= weights[kinds[start]];
        }
    }
    found_bounds[texts] = count;
    return count;
}

/* The least values of random functions over some shingles. */
FOR_EACH_PROCESSOR
static void sketch(const uint64_t *shingles, int64_t count, const uint32_t *masks, const uint32_t *factors, uint32_t *least) {
    memset(least, 0xFF, PERMUTATIONS * sizeof *least);
    for (int64_t i = 0; i < count; i++) {
        const uint32_t shingle = (uint32_t)shingles[i];
        for (int j = 0; j < PERMUTATIONS; j++) {
            const uint32_t value = (shingle ^ masks[j]) * factors[j];
            least[j] = value < least[j] ? value : least[j];
        }
    }
}

/* The keys [texts, BANDS] of the bands of texts, of which each has the shingles [bounds[i], bounds[i + 1]). */
void band_keys(const uint64_t *shingles, const int64_t *bounds, int64_t texts, const uint32_t *masks, const uint32_t *factors,
               uint64_t *keys) {
    uint32_t least[PERMUTATIONS];
    for (int64_t i = 0; i < texts; i++) {
        sketch(shingles + bounds[i], bounds[i + 1] - bounds[i], masks, factors, least);
        for (int band = 0; band < BANDS; band++) {
            uint64_t sum = (uint64_t)band;
            for (int row = 0; row < ROWS; row++)
                sum = sum * GOLDEN + least[band * ROWS + row];
            *keys++ = splitmix64(sum);
        }
    }
}

/* Sort numbers that are well mixed, by their bytes from the highest, which is at `shift`. `spare` has room for as many. */
static void sort(uint64_t *values, uint64_t *spare, int64_t count, int shift) {
    if (count <= FEW || shift < 0) {
        for (int64_t i = 1; i < count; i++) {
            const uint64_t value = values[i];
            int64_t j = i;
            for (; j > 0 && values[j - 1] > value; j--)
                values[j] = values[j - 1];
            values[j] = value;
        }
        return;
    }
    int64_t ends[256] = {0};
    for (int64_t i = 0; i < count; i++)
        ends[values[i] >> shift & 0xFF]++;
    for (int byte = 1; byte < 256; byte++)
        ends[byte] += ends[byte - 1];
    memcpy(spare, values, (size_t)count * sizeof *values);
    for (int64_t i = count; i-- > 0;)
        values[--ends[spare[i] >> shift & 0xFF]] = spare[i];
    for (int byte = 0; byte < 256; byte++) {
        const int64_t end = byte < 255 ? ends[byte + 1] : count; /* by now, they are where each byte begins */
        sort(values + ends[byte], spare, end - ends[byte], shift - 8);
    }
}

/* The distinct values of each set [bounds[i], bounds[i + 1]), ascending, and their bounds. `spare` has room for the largest. */
void distinct(const uint64_t *values, const int64_t *bounds, int64_t sets, uint64_t *spare, uint64_t *found,
              int64_t *found_bounds) {
    int64_t count = 0;
    for (int64_t i = 0; i < sets; i++) {
        const int64_t size = bounds[i + 1] - bounds[i], first = count;
        uint64_t *own = found + first;
        found_bounds[i] = first;
        memcpy(own, values + bounds[i], (size_t)size * sizeof *own);
        sort(own, spare, size, 56);
        for (int64_t j = 0; j < size; j++)
            if (count == first || found[count - 1] != own[j])
                found[count++] = own[j];
    }
    found_bounds[sets] = count;
}

/* The number of members that both sets of each pair have; set i is [bounds[i], bounds[i + 1]), distinct and ascending. */
void common(const uint64_t *members, const int64_t *bounds, const int64_t *pairs, int64_t count, int64_t *shared) {
    for (int64_t i = 0; i < count; i++, pairs += 2) {
        const uint64_t *one = members + bounds[pairs[0]], *one_end = members + bounds[pairs[0] + 1];
        const uint64_t *other = members + bounds[pairs[1]], *other_end = members + bounds[pairs[1] + 1];
        int64_t same = 0;
        while (one < one_end && other < other_end) {
            const uint64_t a = *one, b = *other;
            same += a == b;
            one += a <= b;
            other += b <= a;
        }
        shared[i] = same;
    }
}

/* Which keys may occur again: those that share one of `mask` + 1 slots with another. `slots` has two bits for each, all 0. */
void repeated(const uint64_t *keys, int64_t count, uint64_t mask, uint8_t *slots, uint8_t *found) {
    for (int64_t i = 0; i < count; i++) {
        const uint64_t slot = keys[i] & mask;
        const int place = slot % 4 * 2;
        slots[slot / 4] |= (slots[slot / 4] >> place & 1 ? 2 : 1) << place;
    }
    for (int64_t i = 0; i < count; i++) {
        const uint64_t slot = keys[i] & mask;
        found[i] = slots[slot / 4] >> (slot % 4 * 2) >> 1 & 1;
    }
}
