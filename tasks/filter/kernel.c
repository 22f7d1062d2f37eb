/*
The inner loops of quality rules, in plain C: split texts into words, and count what the rules compare.

`kernel.py` calls `measure` with ctypes, so Python's headers are not needed and other threads run meanwhile. The counts are those
of datatrove's filters. Words are those of spaCy's rules for English: chunks between white space lose prefixes and suffixes, and
are cut at infixes, unless they are special cases or addresses of the web. Equal words, lines and runs of words are compared
character by character; hashes only find candidates.

A text is decoded into code points first, because the rules count characters. Memory is about 25 bytes per byte of the longest text.
*/

#include "rules.h"
#include "words.h"
#include "repetitions.h"
#include "lines.h"

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
