"""Find duplicates, near-duplicates and contaminated documents, verify them, and count each."""
