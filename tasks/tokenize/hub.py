"""Fetching a tokenizer from the Hugging Face hub, into its own cache, at a pinned revision."""

from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from tokenmill.tasks.errors import InputError


def download_tokenizer(repository: str, revision: str | None) -> Path:
    """The local path of a repository's tokenizer.json; what names its BOS and EOS, and its chat
    template, are fetched beside it.

    Raises InputError when the hub does not hand it out.
    """
    try:
        definition = hf_hub_download(repository, "tokenizer.json", revision=revision)
        for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
            _optional(repository, name, revision)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, EntryNotFoundError) as error:
        sentence = str(error).strip().splitlines()[0]
        raise InputError(
            f"tokenizer.model: {repository!r} (revision {revision or 'main'}) cannot be fetched from the hub: {sentence}; "
            "check the spelling, the network and HF_TOKEN, or give a local folder"
        ) from error
    return Path(definition)


def _optional(repository: str, name: str, revision: str | None) -> None:
    try:
        hf_hub_download(repository, name, revision=revision)
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError:
        return
