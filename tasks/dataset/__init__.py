"""Published outputs, opened: the one reader of what preparations write."""
