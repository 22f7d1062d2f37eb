/* Counts of symbols, words and lines, and the lines that C4 keeps. */

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
