"""Messages to token ids and back, turn by turn, without ever tokenising a sampled token again.

The chat template is rendered with placeholders where contents go; what the template wrote is encoded with special tokens,
contents are encoded as plain text. So a tool's output that contains `<|im_end|>` stays text and can't end a turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from postrl.contracts import Message


@dataclass(frozen=True)
class ChatFormat:
    """Tokenizer and chat template of a base model.

    `tokenizer` is a `tokenizers.Tokenizer`; `template` a Jinja template over `messages` and `add_generation_prompt`.
    """

    tokenizer: Any
    template: str
    bos_token: str
    eos_token: str

    def opening(self, messages: Sequence[Message]) -> np.ndarray:
        """int32 [T]: the context before the first completion."""
        return self._encode(self._render(messages, generation_prompt=True), messages)

    def continuation(self, reply_ended: bool, observation: str) -> np.ndarray:
        """int32 [T]: what follows a completion: the end of the reply (unless it was sampled), the observation, and the
        opening of the next reply."""
        messages = (Message("user", "-"), Message("assistant", "-"), Message("user", observation))
        text = self._render(messages, generation_prompt=True)
        after_reply = text.split(_placeholder(1), 1)[1]
        token_T = self._encode(after_reply, messages)
        if token_T[0] != self.eos_id:
            raise ValueError(
                f"the chat template does not end a reply with {self.eos_token!r}, but with {after_reply[:20]!r}"
            )
        return token_T[1:] if reply_ended else token_T

    def decode(self, token_T: np.ndarray) -> str:
        """Text of token ids, special tokens left out."""
        return self.tokenizer.decode(np.asarray(token_T).tolist(), skip_special_tokens=True)

    def encode_reply(self, text: str) -> np.ndarray:
        """int32 [T]: a reply as the policy would have sampled it, its end token included. For demonstrations."""
        return np.array([*self._plain(text), self.eos_id], np.int32)

    @cached_property
    def eos_id(self) -> int:
        return self.tokenizer.token_to_id(self.eos_token)

    @cached_property
    def _compiled_template(self) -> Any:
        try:
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise ValueError("chat templates need the extra `gguf`: pip install -e .[gguf]") from error
        # The template comes from a downloaded file: sandboxed, so that it computes text and nothing else.
        return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(self.template)

    def _render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        return self._compiled_template.render(
            messages=[{"role": m.role, "content": _placeholder(i)} for i, m in enumerate(messages)],
            add_generation_prompt=generation_prompt,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
        )

    def _encode(self, rendered: str, messages: Sequence[Message]) -> np.ndarray:
        ids: list[int] = []
        rest = rendered
        for i, message in enumerate(messages):
            before, found, after = rest.partition(_placeholder(i))
            if not found:
                continue  # before the continuation's first message
            ids += self._special(before)
            ids += self._plain(message.content)
            rest = after
        return np.array(ids + self._special(rest), np.int32)

    @cached_property
    def _plain_tokenizer(self) -> Any:
        # A copy of its own: the switch is state of the tokenizer, and episodes encode from many threads.
        plain = type(self.tokenizer).from_str(self.tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain

    def _special(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _plain(self, text: str) -> list[int]:
        return self._plain_tokenizer.encode(text, add_special_tokens=False).ids


def _placeholder(index: int) -> str:
    return f"\x00{index}\x00"
