"""Reports on a preparation: summaries for the terminal and Prefect artifacts, plots, and what leaves this machine."""
