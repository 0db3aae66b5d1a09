"""Whatever a policy wrote stays text."""

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postrl.report.markup import Html, joined, tag, visible


class Parsed(HTMLParser):
    def __init__(self, markup: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_comes_back_as_text(text):
    parsed = Parsed(tag("pre", text, title=text))
    assert [name for name, _ in parsed.tags] == ["pre"]
    assert parsed.text == visible(text)
    assert parsed.tags[0][1] == {"title": visible(text)}
    visible(text).encode()  # no lone surrogate is left


@pytest.mark.parametrize(
    ("text", "markup"),
    [
        ("</script><script>alert(1)</script>", "&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("a & b \"c\" 'd'", "a &amp; b &quot;c&quot; &#x27;d&#x27;"),
        ("\x1b[31mred\x00\x7f", "␛[31mred␀␡"),
        ("line\n\ttab\r", "line\n\ttab␍"),
        ("user\u202etxt.exe", "user⟨U+202E⟩txt.exe"),
        ("zero\u200bwidth\ufeff", "zero⟨U+200B⟩width⟨U+FEFF⟩"),
        ("\udcff", "⟨U+DCFF⟩"),
        ("naïve 漢字 🙂", "naïve 漢字 🙂"),
    ],
)
def test_escaping_by_hand(text, markup):
    assert joined([text]) == markup


def test_tags_and_attributes():
    assert tag("td", "a<b", None, ["c", tag("br")], class_="num", stroke_width=2, title=None) == Html(
        '<td class="num" stroke-width="2">a&lt;bc<br></td>'
    )
    assert tag("meta", name='"><script>') == '<meta name="&quot;&gt;&lt;script&gt;">'


def test_numbers_are_refused():
    with pytest.raises(TypeError, match=r"float 0\.5 in HTML"):
        joined([0.5])
