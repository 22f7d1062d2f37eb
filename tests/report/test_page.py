"""The page and the cards of a run: figures that others read in the published files too, the same bytes, text that stays text."""

import itertools
import json
import re
from pathlib import Path

import mlcroissant
import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
import yaml
from tokenmill.flows.cli import run
from tokenmill.tasks.blend.models import listed_sources
from tokenmill.tasks.kit import html
from tokenmill.tasks.kit.charts import bars, flow
from tokenmill.tasks.kit.parts import Table
from tokenmill.tasks.report import cards, page
from tokenmill.tasks.report.measured import measured
from tokenmill.tasks.report.registry import lineage
from tokenmill.tasks.shards.manifest import read_manifest

from tests import preparing_scores, preparing_sft
from tests.building import prepare_here
from tests.peers.conversations import assistant, talk, user
from tests.preparing import blend_of, prefixes_of, write_lines
from tests.report.html_page import Page

REPOSITORY = Path(__file__).parents[2]
HOSTILE = '<script>alert("1")</script> & <b>\x1b[0m\u202e'
BLENDS = {
    "pretrain": "tiny", "sft": "tiny-sft", "rl": "tiny-rl", "harmony": "tiny-harmony", "dedup": "tiny",
}  # fmt: skip
SETTINGS = {"sft": {"pack_size": 1024}, "rl": {"target": "nemo_gym"}}


def reported(kind, blend, output, **settings):
    """Prepare, and write the report; what is on its page."""
    prepare_here(kind, blend, output, **settings)
    page.leave_report(str(output), pytest.fail)
    return read_page(output)


@pytest.fixture(scope="module", params=BLENDS)
def published(request, tmp_path_factory):
    """The bundled blend of a kind, prepared twice in different folders, each with its report."""
    outputs = [tmp_path_factory.mktemp(request.param) / "out" for _ in range(2)]
    blend = str(REPOSITORY / "blends" / f"{BLENDS[request.param]}.json")
    for output in outputs:
        reported(request.param, blend, output, **SETTINGS.get(request.param, {}))
    return request.param, *outputs


def read_page(output):
    return Page((Path(output) / "report.html").read_text())


@pytest.mark.slow
def test_a_page_is_small_whole_and_without_scripts_or_requests(published):
    _, output, _ = published
    text = (output / "report.html").read_text()
    found = Page(text)
    assert len(text.encode()) < 1_000_000
    assert not {"script", "img", "link", "iframe", "object", "embed"} & found.tags
    assert {link[1:] for link in found.attributes("href", "src")} <= {*found.attributes("id")}
    assert "Not shown" not in text
    assert text.index('id="to-act-on"') < text.index('id="samples"') < text.index('id="overview"')
    assert str(output) not in text.partition('id="this-run"')[0]


@pytest.mark.slow
def test_equal_preparations_have_equal_pages_and_cards_but_for_the_run_itself(published):
    _, *outputs = published
    pages = [(output / "report.html").read_bytes().partition(b'<h2 id="this-run">')[0] for output in outputs]
    assert pages[0] == pages[1]
    date = re.compile(rb'"datePublished": "[^"]*"')
    for name in (cards.CROISSANT, cards.CARD):
        one, other = (date.sub(b"", (output / name).read_bytes()) for output in outputs)
        assert one == other
    before = (outputs[0] / "report.html").read_bytes()
    page.publish_page(measured(str(outputs[0])))
    assert (outputs[0] / "report.html").read_bytes() == before


def test_counts_match_the_manifest_and_rows_add_up(published):
    _, output, _ = published
    totals, found = read_manifest(str(output))["totals"], read_page(output)
    columns = ["documents", "tokens"] if totals["tokens"] else ["documents"]
    splits = {name: [f"{part[each]:,}" for each in columns] for name, part in totals["splits"].items()}
    assert found.rows("Splits") == splits
    fates = measured(str(output)).fates
    assert sum(fates.values()) == totals["rows"]
    assert sum(count for (_, end), count in fates.items() if end in totals["splits"]) == totals["documents"]


def test_lengths_match_published_files(published):
    kind, output, _ = published
    expected = {"pretrain": by_megatron, "sft": by_packs, "harmony": by_harmony}.get(kind, by_lines)(output)
    rows = read_page(output).rows("Lengths in")
    measured, shortest, longest = (sum(int(row[at].replace(",", "")) for row in rows.values()) for at in (0, 1, 4))
    assert measured == sum(map(len, expected.values()))
    assert shortest == sum(map(min, expected.values()))
    assert longest == sum(map(max, expected.values()))


def by_megatron(output):
    """The lengths of documents, from where megatron-core finds each to begin."""
    found = {}
    for split in ("train", "valid", "test"):
        for prefix in prefixes_of(output, split):
            idx = Path(f"{prefix}.idx").read_bytes()
            count = int.from_bytes(idx[18:26], "little")
            places = np.frombuffer(idx, "<i8", count, 34 + 4 * count)  # where documents begin, in bytes
            size = Path(f"{prefix}.bin").stat().st_size
            found[str(prefix)] = (np.diff(places, append=size) // 4).tolist()
    return found


def by_packs(output):
    found = {}
    for file in sorted((output / "splits").rglob("*.parquet")):
        for row in pq.read_table(file).to_pylist():
            borders = [*row["seq_start_id"], len(row["input_ids"])]
            found.setdefault(str(file), []).extend(stop - start for start, stop in itertools.pairwise(borders))
    return found


def by_harmony(output):
    files = (output / "data").rglob("*.parquet")
    return {str(file): pq.read_table(file)["stats_token_len"].to_pylist() for file in files}


def by_lines(output):
    files = [file for file in output.rglob("*.jsonl") if file.parent.name != "splits" and "shards" not in file.parts]
    return {str(file): [len(line) for line in file.read_bytes().splitlines()] for file in files}


def test_masks_by_role_match_the_packs(published):
    kind, output, _ = published
    if kind != "sft":
        return
    rows = [row for file in (output / "splits/train").glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    stored, trained = sum(len(row["input_ids"]) for row in rows), sum(sum(row["loss_mask"]) for row in rows)
    found = read_page(output).rows("Tokens by role in the first packs, train")
    assert found["all"][:2] == [f"{stored:,}", f"{trained:,}"]
    assert found["assistant"][1] == f"{trained:,}"
    fill = read_page(output).rows("The first packs of each file")["train"]
    assert fill[:2] == [str(len(rows)), f"{stored:,}"]
    assert fill[2] == f"{stored / len(rows) / 1024:.1%}"


def test_tokens_per_byte_are_measured_on_the_text_itself(published):
    kind, output, _ = published
    if kind != "pretrain":
        return
    texts = [json.loads(line)["text"] for line in (REPOSITORY / "blends/tiny/paragraphs.jsonl").open()]
    documents, tokens, size, _ = read_page(output).rows("Tokens per byte")["paragraphs"]
    assert documents == str(len(texts))
    assert size == f"{sum(len(text.encode()) for text in texts):,}"
    assert int(tokens.replace(",", "")) == 2443 - len(texts)  # without EOS


def test_croissant_is_valid_and_names_sources(published):
    kind, output, _ = published
    data = mlcroissant.Dataset(jsonld=str(output / cards.CROISSANT))
    assert not data.metadata.issues.errors
    assert not data.metadata.issues.warnings
    written = orjson.loads((output / cards.CROISSANT).read_bytes())
    sources = listed_sources(read_manifest(str(output))["blend"])
    assert len(written["prov:wasDerivedFrom"]) == sum(map(len, sources.values()))
    if kind == "harmony":
        (rows,) = [each for each in data.metadata.record_sets if each.name == "parquet-rows"]
        (file,) = (output / "data").rglob("*.parquet")
        assert {field.name for field in rows.fields} == {*pq.read_schema(file).names}


def test_a_card_has_front_matter_and_the_published_counts(published):
    kind, output, _ = published
    text = (output / cards.CARD).read_text()
    matter = yaml.safe_load(text.split("---\n")[1])
    assert matter["size_categories"] == ["1K<n<10K"] if kind in {"pretrain", "dedup"} else ["n<1K"]
    totals = read_manifest(str(output))["totals"]
    summary = cards.training_summary(measured(str(output)))
    assert not (output / cards.SUMMARY).exists(), "it is written on request only"
    assert f"| Documents | {totals['documents']:,} |" in summary
    assert f"{totals['rows']:,} rows were read, {totals['documents']:,} documents were kept" in summary
    headings = re.findall(r"^#+ (\d\.\S*)", summary, re.MULTILINE)
    second = ["2.1.", "2.2.", "2.2.1.", "2.2.2.", "2.3.", "2.4.", "2.5.", "2.6."]
    assert headings == ["1.", "1.1.", "1.2.", "1.3.", "2.", *second, "3.", "3.1.", "3.2.", "3.3."]


@pytest.mark.parametrize(
    ("licences", "whole"),
    [
        (["cc-by-4.0"], "cc-by-4.0"),
        (["cc-by-4.0", "CC BY-SA 4.0"], "cc-by-sa-4.0"),
        (["apache-2.0", "odc-by-1.0"], "odc-by"),
        (["cc-by-nc-4.0", "cc-by-sa-4.0"], "cc-by-nc-4.0"),
        (["cc-by-4.0", "none named"], "other"),
        (["cc-by-4.0", "my own"], "other"),
        (["my own"], "my own"),
        (["not stated"], "other"),
        ([], "other"),
    ],
)
def test_the_license_of_the_whole(licences, whole):
    assert cards.strictest(licences) == whole


def test_cards_list_only_stated_languages(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", ["text", "more"])
    source = {"name": "a", "path": str(path), "languages": ["de", "gsw"]}
    other = {"name": "b", "path": str(write_lines(tmp_path / "other.jsonl", ["text"])), "domain": "mills"}
    for sources, spoken in (([source, other], ["de", "gsw"]), ([other], None)):
        reported("pretrain", {"datasets": sources}, tmp_path / "out")
        assert yaml.safe_load((tmp_path / "out/README.md").read_text().split("---\n")[1]).get("language") == spoken
        written = mlcroissant.Dataset(jsonld=str(tmp_path / "out" / cards.CROISSANT)).metadata
        assert written.in_language == spoken
        summary = cards.training_summary(measured(str(tmp_path / "out")))
        assert ("de, gsw: 2 documents; not stated: 1 documents" in summary) is bool(spoken)
        assert run(["verify", str(tmp_path / "out")]) == 0


def test_croissant_names_the_sources_of_sources_and_verify_needs_none_of_them(tmp_path):
    path = write_lines(tmp_path / "in/in.jsonl", ["text", "text", "more"])
    source = {"name": "a", "path": str(path), "license": "MIT"}
    prepare_here("dedup", {"datasets": [source]}, tmp_path / "deduplicated", near=False)
    reported("pretrain", str(tmp_path / "deduplicated/blend.json"), tmp_path / "out")
    (near,) = orjson.loads((tmp_path / "out" / cards.CROISSANT).read_bytes())["prov:wasDerivedFrom"]
    (far,) = near["prov:wasDerivedFrom"]
    assert (far["prov:atLocation"], far["sc:license"]) == ("in.jsonl", "MIT")
    assert "prov:wasDerivedFrom" not in far
    assert not mlcroissant.Dataset(jsonld=str(tmp_path / "out" / cards.CROISSANT)).metadata.issues.errors
    (above,) = lineage(str(tmp_path / "out"))["made_from"]
    assert (above["type"], above["made_from"][0]["path"]) == ("dedup", str(tmp_path / "in/in.jsonl"))
    (tmp_path / "deduplicated").rename(tmp_path / "elsewhere")
    assert run(["verify", str(tmp_path / "out")]) == 0


def test_verify_makes_every_figure_again(published, capfd):
    _, output, _ = published
    assert run(["verify", str(output)]) == 0
    assert run(["report", str(output), "--training-summary"]) == 0
    for name, was in (("report.html", b"<td"), (cards.SUMMARY, b"1"), (cards.CROISSANT, b"documents")):
        before = (output / name).read_bytes()
        (output / name).write_bytes(before.replace(was, b"<td " if was == b"<td" else b"9", 1))
        capfd.readouterr()
        assert run(["verify", str(output)]) == 1
        assert name in capfd.readouterr().err
        (output / name).write_bytes(before)
    page.publish_cards(measured(str(output)))
    assert run(["verify", str(output)]) == 0, "a summary that was asked for is kept up"
    (output / cards.SUMMARY).unlink()


def colours(theme):
    """The colours of a theme by the names of the style sheet: red, green and blue from 0 to 1."""
    sheet = html.document("style.css.jinja").partition("@media")
    found = dict(re.findall(r"--([\w]+): (#\w+);", sheet[0] if theme == "light" else sheet[2]))
    assert {"back", "ink", "aside", "rule", "trained", "edge", "c0", "c5"} <= found.keys()
    return {name: rgb(value) for name, value in found.items()}


def rgb(value):
    digits = value[1:] if len(value) == 7 else "".join(2 * digit for digit in value[1:])
    return np.array([int(digits[at : at + 2], 16) for at in (0, 2, 4)]) / 255


def contrast(one, other):
    """The contrast of two colours as WCAG 2.2 defines it."""
    linear = [np.where(each <= 0.04045, each / 12.92, ((each + 0.055) / 1.055) ** 2.4) for each in (one, other)]
    low, high = sorted(float(each @ [0.2126, 0.7152, 0.0722]) for each in linear)
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_computed_as_wcag_does():
    assert contrast(rgb("#000"), rgb("#fff")) == pytest.approx(21)
    assert contrast(rgb("#777777"), rgb("#fff")) == pytest.approx(4.48, abs=0.005)  # the known grey that just fails


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_is_readable_on_its_background(theme):
    of = colours(theme)
    code = 0.06 * of["ink"] + 0.94 * of["back"]
    sheet = html.document("style.css.jinja")
    marks = [float(share) / 100 for share in re.findall(r"color-mix\(in srgb, #\w+ (\d+)%", sheet)]
    tints = [rgb(value) for value in re.findall(r"color-mix\(in srgb, (#\w+)", sheet)]
    grounds = [mark * tint + (1 - mark) * of["back"] for mark, tint in zip(marks, tints, strict=True)]
    text = [("ink", of["back"]), ("aside", of["back"]), ("c0", of["back"]), ("ink", of["trained"]), ("ink", code)]
    assert len(grounds) == 3
    assert {name: each for name, ground in [*text, *(("ink", each) for each in grounds)]
            if (each := contrast(of[name], ground)) < 4.5} == {}  # fmt: skip
    (opacity,) = (
        float(mark.attributes["opacity"]) for mark in flow("f", {("a", "b"): 1}, ()).marks if mark.tag == "path"
    )
    series = {f"c{at}": of[f"c{at}"] for at in range(6)}
    bands = {f"{name} as a band": opacity * series[name] + (1 - opacity) * of["back"] for name in ("c0", "c1")}
    drawn = {**series, **bands, "edge": of["edge"]}
    assert {name: each for name, colour in drawn.items() if (each := contrast(colour, of["back"])) < 3} == {}


@pytest.mark.slow
def test_score_pages_match_their_tables(tmp_path):
    rows = preparing_scores.normalization(tmp_path, count=12)
    model = preparing_scores.harmony_model(tmp_path / "model")
    for what, column, chosen in (("nll", "total_token_count", {"model": model}), ("embed", "token_count", {})):
        out = tmp_path / what
        preparing_scores.prepare(what, rows, out, **chosen)
        page.leave_report(str(out), pytest.fail)
        text, found = (out / "report.html").read_text(), read_page(out)
        assert len(text.encode()) < 1_000_000
        assert "Not shown" not in text
        table = preparing_scores.table_of(out / {"embed": "embeddings"}.get(what, what))
        lengths = table[column].to_pylist()
        shown = found.rows("Lengths in tokens").values()
        assert sum(int(row[0]) for row in shown) == len(lengths) == 24
        assert max(int(row[4]) for row in shown) == max(lengths)
        assert f"{table['row_id'][0].as_py()}" in text
        assert "max_bad_row_fraction" not in text.partition("Settings that can change")[0]
        assert run(["verify", str(out)]) == 0
        (out / "report.html").write_text(text.replace(f">{max(lengths)}<", ">1<"))
        assert run(["verify", str(out)]) == 1


def test_rows_are_counted_by_stated_values_only(tmp_path):
    rows = [{"text": f"row {at}", "language": "de" if at % 3 else "gsw", "lang": at, "title": "en"} for at in range(9)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": "a", "path": str(tmp_path / "in.jsonl"), "domain": "mills"}
    found = reported("dedup", {"datasets": [source]}, tmp_path / "out", near=False)
    assert found.rows("language: the most frequent of 2 values") == {"de": ["6"], "gsw": ["3"]}
    assert found.rows("Domain, as the blend states") == {"mills": ["9"]}
    assert not [name for name in found.tables if name.startswith(("lang:", "title", "Languages,"))]


def test_hostile_text_is_shown_as_text(tmp_path):
    write_lines(tmp_path / "<b>in&/<i>x.jsonl", [HOSTILE * 3, b"{<script>", "plain"])
    blend = {"datasets": [{"name": "a", "path": str(tmp_path / "<b>in&"), "license": "<u>|MIT"}]}
    found = reported("pretrain", blend, tmp_path / "out")
    text = (tmp_path / "out/report.html").read_text()
    assert not {"script", "b", "i", "u"} & found.tags
    assert "&lt;script&gt;alert(" in text
    assert not re.search("[\x1b\u202e]", text)
    assert "| <u>" not in (tmp_path / "out" / cards.CARD).read_text()
    assert found.rows("Files with the most bad")["<b>in&/<i>x.jsonl"][:3] == ["3", "1", "1"]


def test_a_report_that_fails_is_a_warning_with_the_remedy(tmp_path, monkeypatch):
    write_lines(tmp_path / "in.jsonl", ["text"])
    prepare_here("pretrain", {"datasets": [{"name": "a", "path": str(tmp_path / "in.jsonl")}]}, tmp_path / "out")
    monkeypatch.setattr(page, "sections", lambda run: 1 / 0)
    told = []
    page.leave_report(str(tmp_path / "out"), told.append)
    assert len(told) == 1
    assert f"tokenmill report {tmp_path / 'out'}" in told[0]
    assert not (tmp_path / "out/report.html").exists()


def test_many_datasets_are_shown_in_part_and_all_counted():
    links = {(f"d{number}", "train"): number + 1 for number in range(400)}
    drawn = flow("flow", links, ())
    counts = [int(count.replace(",", "")) for count in re.findall(r"to train: ([\d,]+)", drawn.description)[:16]]
    assert sum(counts) == sum(links.values())
    assert "more in the table" in bars("bars", {f"d{number}": (1.0,) for number in range(40)}, ("x",), str).title
    assert (
        "300 more rows"
        in html.Rendered([Table("t", ("a", "b"), [(f"d{number}", number) for number in range(400)])])._repr_html_()
    )
    assert html.Rendered([Table("t", ("a",), [])])._repr_html_().startswith("<div")


def percent(text):
    return float(text.rstrip("%")) / 100


def table_of_weights(output):
    """Share planned, share published and amount of each dataset on the page of a preparation."""
    page.leave_report(str(output), pytest.fail)
    rows = read_page(output).tables["Shares of train"]
    return {row[0]: (percent(row[1]), percent(row[2]), int(row[3].replace(",", ""))) for row in rows[1:]}


def test_repeated_packs_and_rows_are_counted_as_often_as_they_are_published(tmp_path):
    for name in "ab":
        talks = [talk(user(f"{name} {number}?"), assistant(f"{number}. " * 9)) for number in range(120)]
        preparing_sft.write_rows(tmp_path / f"{name}.jsonl", talks)
    blend = blend_of(tmp_path / "a.jsonl", tmp_path / "b.jsonl", a=3.0)
    chosen = {"holdout": {"valid": 0, "test": 0}, "sampling": "up"}
    _, manifest = preparing_sft.prepare(blend, tmp_path / "sft", pack_size=64, **chosen)
    shares = table_of_weights(tmp_path / "sft")
    taken = {name: each["tokens"] for name, each in manifest["sampling"]["splits"]["train"].items()}
    assert {name: each[2] for name, each in shares.items()} == taken
    assert shares["a"][1] == pytest.approx(0.75, abs=0.02)
    prepare_here("rl", blend, tmp_path / "rl", batch_size=8, **chosen)
    assert table_of_weights(tmp_path / "rl") == {"a": (0.75, 0.75, 360), "b": (0.25, 0.25, 120)}


def test_phases_are_shown_as_planned_and_as_published(tmp_path):
    for name in "ab":
        write_lines(tmp_path / f"{name}.jsonl", [f"{name} {number} " * 9 for number in range(200)])
    phases = [{"name": "main", "share": 0.75}, {"name": "end", "share": 0.25, "mix": {"b": 0.9}}]
    blend = {**blend_of(tmp_path / "a.jsonl", tmp_path / "b.jsonl"), "tokens": 4000, "phases": phases}
    found = reported("pretrain", blend, tmp_path / "out", holdout={"valid": 0, "test": 0})
    shares = [(row[0], row[1], percent(row[2]), percent(row[3])) for row in found.tables["Phases"][1:]]
    assert [(phase, name, planned) for phase, name, planned, _ in shares] == [
        ("main", "a", 0.5), ("main", "b", 0.5), ("end", "a", 0.1), ("end", "b", 0.9),
    ]  # fmt: skip
    assert all(published == pytest.approx(planned, abs=0.03) for _, _, planned, published in shares)
