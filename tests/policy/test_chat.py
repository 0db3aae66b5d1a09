"""Messages to tokens and back: the template's tokens are special, contents are text whatever they contain."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postrl.contracts import Message
from tests.policy.tiny import CHATML, tiny_chat

CHAT = tiny_chat()
START, END = (CHAT.tokenizer.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
MESSAGES = (Message("system", "Use tools."), Message("user", "Count the lines."))
RENDERED = (
    "<|im_start|>system\nUse tools.<|im_end|>\n<|im_start|>user\nCount the lines.<|im_end|>\n<|im_start|>assistant\n"
)
texts = st.text(st.characters(codec="utf-8"), max_size=40)
hostile = st.lists(
    st.sampled_from(["<|im_end|>", "<|im_start|>", "assistant\n", "\x000\x00", "\x002\x00", "a", "{{", "{% "])
)


def encoded(text: str) -> list[int]:
    return CHAT.tokenizer.encode(text, add_special_tokens=False).ids


def test_opening_equals_the_encoding_of_the_rendered_template():
    assert CHAT.opening(MESSAGES).tolist() == encoded(RENDERED)
    assert CHAT.opening(MESSAGES).dtype == np.int32
    assert CHAT.eos_id == END


def test_continuation_equals_the_rest_of_the_rendered_template():
    after_reply = "\n<|im_start|>user\n3 files<|im_end|>\n<|im_start|>assistant\n"
    assert CHAT.continuation(True, "3 files").tolist() == encoded(after_reply)
    assert CHAT.continuation(False, "3 files").tolist() == [END, *encoded(after_reply)]


def test_a_conversation_is_the_encoding_of_the_whole_rendering():
    """Opening, reply, continuation, reply: joined, the very tokens of the rendered chat."""
    parts = [
        CHAT.opening(MESSAGES),
        CHAT.encode_reply("wc -l a"),
        CHAT.continuation(True, "2 a"),
        CHAT.encode_reply("done"),
    ]
    whole = RENDERED + "wc -l a<|im_end|>\n<|im_start|>user\n2 a<|im_end|>\n<|im_start|>assistant\ndone<|im_end|>"
    assert np.concatenate(parts).tolist() == encoded(whole)


@settings(deadline=None)
@given(hostile.map("".join))
def test_special_tokens_in_contents_stay_text(text):
    opening = CHAT.opening((Message("system", text), Message("user", text))).tolist()
    assert (opening.count(START), opening.count(END)) == (3, 2)
    continuation = CHAT.continuation(False, text).tolist()
    assert (continuation.count(START), continuation.count(END)) == (2, 2)
    reply = CHAT.encode_reply(text).tolist()
    assert (reply.count(START), reply.count(END), reply[-1]) == (0, 1, END)
    assert CHAT.decode(np.array(reply)) == text


@settings(deadline=None)
@given(texts)
def test_replies_survive(text):
    reply = CHAT.encode_reply(text)
    assert reply.dtype == np.int32
    assert reply[-1] == END
    assert CHAT.decode(reply) == text


@settings(deadline=None)
@given(texts, texts)
def test_contents_never_touch_the_template(system, user):
    """The opening is the template's tokens with each content's bytes in its place: one token a byte, nothing merged."""
    opening = CHAT.opening((Message("system", system), Message("user", user)))
    bare = CHAT.opening((Message("system", ""), Message("user", "")))
    num_bytes = len(system.encode()) + len(user.encode())
    assert len(opening) == len(bare) + num_bytes
    start = len(encoded("<|im_start|>system\n"))
    assert CHAT.decode(opening[start : start + len(system.encode())]) == system


def test_a_template_that_ends_replies_otherwise_is_refused():
    other = tiny_chat(CHATML.replace("<|im_end|>\n{% endfor %}", "<|im_start|>\n{% endfor %}"))
    with pytest.raises(ValueError, match=r"does not end a reply with '<\|im_end\|>', but with '<\|im_start\|>"):
        other.continuation(True, "x")


def test_the_template_is_sandboxed():
    from jinja2.exceptions import SecurityError

    escape = tiny_chat("{{ messages.__class__.__mro__ }}" + CHATML)
    with pytest.raises(SecurityError):
        escape.opening(MESSAGES)
