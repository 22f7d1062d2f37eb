"""The stand-in hub answers the real clients as the hub does."""

import itertools
from pathlib import Path

import pytest
from huggingface_hub import HfApi, HfFileSystem, get_hf_file_metadata, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tests.hub_server import EXPIRED, LARGE, PAGE, SECOND_HOST

FILES = {
    "README.md": "---\nlicense: mit\n---\n",
    "config.json": "{}",
    "a/large.bin": bytes(range(256)) * 9,
    "a/b/c": "c",
}


def test_downloads_are_one_commit_and_tokens_are_not_sent_elsewhere(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_member")
    repository = hub.model("Some-org/A.model-1.5", FILES, gated=True, members={"hf_member"})
    folder = snapshot_download("Some-org/A.model-1.5", endpoint=hub.url)
    assert folder.endswith(repository.branches["main"])
    assert hf_hub_download("Some-org/A.model-1.5", "a/large.bin", local_files_only=True).startswith(folder)
    assert Path(f"{folder}/a/large.bin").read_bytes() == FILES["a/large.bin"]
    assert {request.token for request in hub.requests if request.host == SECOND_HOST} == {None}
    assert {request.token for request in hub.requests if request.host != SECOND_HOST} == {"hf_member"}


def test_listings_have_pages_folders_refs_and_commits(hub):
    names = {f"data/{number}.txt": "x" for number in range(PAGE + 1)}
    repository = hub.dataset("org/many.rows", names)
    second = repository.commit({"x": "y"}, "v/2")
    api = HfApi(endpoint=hub.url)
    assert len(list(api.list_repo_tree("org/many.rows", recursive=True, repo_type="dataset"))) == PAGE + 2
    assert [each.path for each in api.list_repo_tree("org/many.rows", repo_type="dataset")] == ["data"]
    assert api.dataset_info("org/many.rows", revision="v/2").sha == second
    assert {each.name for each in api.list_repo_refs("org/many.rows", repo_type="dataset").branches} == {"main", "v/2"}
    assert len(api.list_repo_commits("org/many.rows", repo_type="dataset")) == 2
    assert HfFileSystem(endpoint=hub.url).exists("datasets/org/many.rows/data/7.txt")


def test_sizes_and_digests_match_the_files(hub):
    hub.model("org/name", FILES)
    with_sizes = HfApi(endpoint=hub.url).model_info("org/name", files_metadata=True)
    assert {each.rfilename: each.size for each in with_sizes.siblings} == {name: len(FILES[name]) for name in FILES}
    assert {each.rfilename for each in with_sizes.siblings if each.lfs} == {"a/large.bin"}
    assert {each.size for each in HfApi(endpoint=hub.url).model_info("org/name").siblings} == {None}


@pytest.mark.parametrize(
    ("name", "file", "revision", "token", "error"),
    [
        ("org/nope", "config.json", None, None, RepositoryNotFoundError),
        ("org/private", "config.json", None, None, RepositoryNotFoundError),
        ("org/private", "config.json", None, "hf_stranger", RepositoryNotFoundError),
        ("org/private", "config.json", None, "hf_member", None),
        ("org/gated", "config.json", None, None, GatedRepoError),
        ("org/gated", "config.json", None, "hf_stranger", GatedRepoError),
        ("org/gated", "config.json", None, "hf_member", None),
        ("org/open", "config.json", None, EXPIRED, HfHubHTTPError),
        ("org/open", "nope.json", None, None, EntryNotFoundError),
        ("org/open", "config.json", "nope", None, RevisionNotFoundError),
        ("old", "config.json", "main", None, None),
        ("org/older", "a/large.bin", None, None, None),
    ],
)
def test_client_errors_match_the_hub(hub, monkeypatch, name, file, revision, token, error):
    hub.model("org/open", FILES)
    hub.model("org/gated", FILES, gated=True, members={"hf_member"})
    hub.model("org/private", FILES, private=True, members={"hf_member"})
    hub.renamed |= {"models/old": "org/open", "models/org/older": "org/open"}
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    if error is None:
        assert hf_hub_download(name, file, revision=revision, endpoint=hub.url)
        return
    with pytest.raises(error):
        get_hf_file_metadata(f"{hub.url}/{name}/resolve/{revision or 'main'}/{file}", token=token)


def test_faults_occur_as_often_as_planned(hub):
    repository = hub.model("org/name", FILES)
    hub.fault("/lfs/*", 429, method="GET", headers={"Retry-After": "7"})
    hub.fault("/lfs/*", "cut", method="GET", times=2)
    assert Path(hf_hub_download("org/name", "a/large.bin", endpoint=hub.url)).read_bytes() == FILES["a/large.bin"]
    assert 8.0 in hub.waits
    assert not hub.faults
    commits = itertools.count()
    hub.fault("*/config.json", lambda: repository.commit({**FILES, "config.json": f"[{next(commits)}]"}))
    assert Path(hf_hub_download("org/name", "config.json", endpoint=hub.url)).read_text() == "[0]"
    assert len(FILES["a/large.bin"]) > LARGE
