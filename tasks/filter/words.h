/* Words, as spaCy's rules for English cut them. */

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
