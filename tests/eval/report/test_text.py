"""Text that models write: made visible, cut into tokens, compared, shortened."""

# ruff: noqa: RUF001 (the report writes real minus and multiplication signs)

import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit_eval.report.diff import mark_differences, split_tokens
from quantkit_eval.report.flips import Flip, Side, cut_middle, shortened
from quantkit_eval.report.quantities import duration, number, points, probability, ratio, size, unit_named
from quantkit_eval.report.visible import visible, visible_record

any_text = st.text(st.characters(exclude_categories=()))  # lone surrogates too


@given(any_text)
def test_visible_text_fits_utf8_and_xml(text: str) -> None:
    shown = visible(text)
    ET.fromstring(f"<a>{shown.replace('&', '&amp;').replace('<', '&lt;')}</a>".encode())
    assert len(shown) >= len(text)


def test_visible_shows_what_would_hide() -> None:
    assert visible("a\x00b\r\n\x1b[31m\u202egpj\ud800") == "a␀b␍\n␛[31m⟨U+202E⟩gpj⟨U+D800⟩"
    assert visible("שלום\u200d👩\u200d🚀\tnaïve\n") == "שלום\u200d👩\u200d🚀\tnaïve\n", "letters and joiners must stay"
    assert visible_record({"a\x00": ["\x07", None, 1.5, True]}) == {"a␀": ["␇", None, 1.5, True]}


@given(st.text())
def test_tokens_give_the_text_back(text: str) -> None:
    assert "".join(split_tokens(text)) == text


def test_tokens_keep_clusters_together() -> None:
    assert split_tokens("日本 हिन्दी 👩🏽\u200d🚀! e\u0301t") == [
        "日",
        "本",
        " ",
        "हिन्दी",
        " ",
        "👩🏽\u200d🚀",
        "!",
        " ",
        "e\u0301t",
    ]


@given(st.text("ab ,\n", max_size=80), st.text("ab ,\n", max_size=80))
def test_differences_cover_both_texts_and_start_at_the_divergence(left: str, right: str) -> None:
    found = mark_differences(left, right)
    assert "".join(segment.text for segment in found.baseline) == left
    assert "".join(segment.text for segment in found.candidate) == right
    if left == right:
        assert found.divergence is None
        assert not any(segment.changed for segment in found.baseline + found.candidate)
        return
    assert found.divergence is not None
    assert left[: found.divergence] == right[: found.divergence]
    assert any(segment.changed for segment in found.baseline + found.candidate)
    for segments in (found.baseline, found.candidate):
        position = 0
        for segment in segments:
            assert not segment.changed or position >= found.divergence, "something is marked before the divergence"
            position += len(segment.text)
    same = ["".join(s.text for s in side if not s.changed) for side in (found.baseline, found.candidate)]
    assert same[0].split() == same[1].split(), "what is not marked must be equal, white space aside"


def test_differences_mark_the_words_that_changed() -> None:
    found = mark_differences('{"born": 1815, "city": "Oslo"}', '{"born": "1815", "city": "Osaka"}')
    assert found.divergence == len('{"born": ')
    assert [segment.text for segment in found.baseline if segment.changed] == ["Oslo"]
    assert [segment.text for segment in found.candidate if segment.changed] == ['"', '"', "Osaka"]


def test_texts_without_resemblance_are_marked_whole() -> None:
    found = mark_differences('{"a": 1}', "The name of the person is the name of the person and so on")
    assert [segment.changed for segment in found.candidate] == [True]
    assert found.divergence == 0


def test_a_loop_of_a_broken_model_is_marked_without_aligning_it() -> None:
    loop = "the city of " * 2000
    found = mark_differences("the city of Oslo, and much more " * 500, loop)
    assert [segment.changed for segment in found.candidate] == [False, True]


def test_shortening_keeps_the_divergence_in_sight() -> None:
    shared = "same " * 400
    marked = mark_differences(shared + "left", shared + "right" + " tail" * 300)
    sides = [Side(segments, 0, 0, ()) for segments in (marked.baseline, marked.candidate)]
    flip = Flip("s", "i", "regressed", "p" * 1000, "g", marked.divergence, *sides)
    cut = shortened(flip, 100)
    assert len(cut.prompt) < 150
    assert "900 characters left out" in cut.prompt
    for side, full in ((cut.baseline, shared + "left"), (cut.candidate, shared + "right" + " tail" * 300)):
        kept = "".join(segment.text for segment in side.segments)
        assert full[side.before : len(full) - side.after] == kept
        assert len(kept) == 100
        assert side.before <= len(shared) < side.before + len(kept), "the divergence was cut away"
    assert shortened(flip, 10_000) == flip
    assert cut_middle("abc", 3) == "abc"


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (number(None), "–"),
        (number(0.0), "0"),
        (number(-1234567), "−1,234,567"),
        (number(0.4124), "0.412"),
        (number(0.1), "0.1"),
        (number(1e-7), "1e−7"),
        (number(-2.345e-6), "−2.34e−6"),
        (number(1234.5), "1,234"),
        (number(math.inf), "not finite"),
        (points(-0.90625), "−90.6 pp"),
        (points(0.0), "0 pp"),
        (points(0.0004), "0 pp"),
        (points(0.031), "+3.1 pp"),
        (ratio(1.784), "×1.78"),
        (size(269_060_552), "269 MB"),
        (size(999), "999 bytes"),
        (size(1_310_000_000), "1.3 GB"),
        (duration(41.72), "41.7 s"),
        (duration(221), "3 min 41 s"),
        (duration(7260), "2 h 1 min"),
        (probability(1.9e-9), "<\u00a00.0001"),
        (probability(0.00049), "0.0005"),
        (probability(1.0), "1.000"),
        (unit_named("fraction").interval([-0.971, -0.762], of_difference=True), "−97.1 to −76.2 pp"),
        (unit_named("fraction").interval([0.1, 1.0]), "10% to 100%"),
        (unit_named("nats_per_token").interval([0.383, 0.445]), "0.383 to 0.445 nats"),
        (unit_named("tok_per_s").value(29.4), "29.4 tok/s"),
        (unit_named("ratio").interval(None), "–"),
    ],
)
def test_numbers_read_as_people_write_them(shown: str, wanted: str) -> None:
    assert shown == wanted
