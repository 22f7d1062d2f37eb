"""Numbers people look at: the summary of a preparation, in the terminal and as Prefect artifacts."""
