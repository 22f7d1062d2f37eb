/* Repeated words, runs of words, lines and paragraphs. */

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
