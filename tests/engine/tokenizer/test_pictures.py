"""Images among the parts of messages: templates that take texts, parts, or both."""

from __future__ import annotations

from typing import Any

import pytest

from engine.tokenizer.chat_template import render_template
from engine.tokenizer.pictures import without_pictures
from engine.types import Picture, RenderInput

BOTH = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %};{% endfor %}"
)
PARTS = (
    "{% for m in messages %}{{ m.role }}:{% if m.content[0]['type'] == 'image' %}{% endif %}"
    "{% for part in m.content %}{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}"
    "{{ part['text'] }}{% endif %}{% endfor %};{% endfor %}"
)
FIRST = (
    "{% for m in messages %}{{ m.role }}:"
    "{% for part in m.content | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %};"
    "{% endfor %}"
)
TEXT = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
RED, GREEN = Picture(b"red", b"r"), Picture(b"green", b"g")


def image(picture: Picture) -> dict[str, Any]:
    return {"type": "image", "image": picture}


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (BOTH, "system:be;user:a<image>b<image>;assistant:;user:more;"),
        (PARTS, "system:be;user:a<image>b<image>;assistant:;user:more;"),
        (FIRST, "system:be;user:<image><image>ab;assistant:;user:more;"),
    ],
)
def test_every_template_prints_texts_and_places(source: str, told: str) -> None:
    content = [{"type": "text", "text": "a"}, image(RED), {"type": "text", "text": "b"}, image(GREEN)]
    inp = RenderInput(
        [
            {"role": "system", "content": "be"},
            {"role": "user", "content": content},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": "more"},
        ],
        image_options={"max_pixels": 3},
    )
    plain, pictures = without_pictures(inp)
    assert [(picture.png, picture.options) for picture in pictures] == [
        (b"red", (("max_pixels", 3),)),
        (b"green", (("max_pixels", 3),)),
    ]
    assert render_template(source, plain, {}) == told


def test_a_template_of_texts_is_given_texts() -> None:
    inp = RenderInput([{"role": "user", "content": "hi"}])
    assert without_pictures(inp) == (inp, [])
    assert render_template(TEXT, inp, {}) == "user:hi;"
