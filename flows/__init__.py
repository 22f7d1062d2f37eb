"""The flows, one file each: wiring that reads as prose from top to bottom. The functions they call are in `tasks`."""

from tokenmill.tasks.console import log_errors_as_sentences, never_end_by_printing

never_end_by_printing()
log_errors_as_sentences()
